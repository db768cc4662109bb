"""How the page looks, on a screen and on paper, and the little that it does."""

CSS = """
:root { color-scheme: light; --ink: #1c2733; --soft: #5b6875; --line: #dde3e8; --tint: #f5f8fa; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { margin: 0; font-size: 2rem; }
h2 { margin: 2.5rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--line); }
h3 { margin: 1rem 0 .25rem; font-size: 1rem; color: var(--soft); }
.lead { margin: .25rem 0; font-size: 1.1rem; color: var(--soft); }
.note { color: var(--soft); font-size: .875rem; }
.wide { overflow-x: auto; }
figure { margin: 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th[scope=row] { text-align: left; font-weight: 500; overflow-wrap: anywhere; }
thead th { border-bottom: 2px solid var(--ink); }
thead th:first-child { text-align: left; font-weight: 400; color: var(--soft); }
.result tbody tr:first-child td { font-weight: 600; }
.result tr:hover td, .result tr:hover th { background: var(--tint); }
small { color: var(--soft); font-weight: 400; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: #0b62a3; }
details.settings td { text-align: left; overflow-wrap: anywhere; }
select { font: inherit; padding: .15rem .4rem; }
.print-only { display: none; }
@media print {
  body { font-size: 11px; }
  main { max-width: none; padding: 0; }
  .screen-only, .modebar { display: none !important; }
  .print-only { display: block; }
  figure, .map, tr, h3 { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  th, td { padding: .15rem .4rem; }
}
"""

SCRIPT = """
const maps = [...document.querySelectorAll('.map')], which = document.getElementById('which');
const resize = element => element.querySelectorAll('.js-plotly-plot').forEach(plot => {
  if (plot.offsetParent) Plotly.Plots.resize(plot);
});
if (which) which.addEventListener('change', () => maps.forEach((map, i) => {
  map.hidden = i !== Number(which.value);
  resize(map);
}));
let closed = [];
addEventListener('beforeprint', () => {
  closed = [...document.querySelectorAll('details:not([open])')];
  closed.forEach(each => { each.open = true; });
  resize(document);
});
addEventListener('afterprint', () => { closed.forEach(each => { each.open = false; }); resize(document); });
"""
