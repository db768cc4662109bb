"""The report of a comparison: one HTML file that needs nothing else."""

from gnmr.report.html import write_report as write_report
