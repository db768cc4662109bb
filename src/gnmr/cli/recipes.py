"""``gnmr recipes``: what is packaged."""


def recipes() -> None:
    """List the packaged recipes."""
    from rich.console import Console
    from rich.table import Table

    from gnmr.lab.recipe import list_recipes

    table = Table("recipe", "what it is")
    for name, description in list_recipes().items():
        table.add_row(name, description)
    Console().print(table)
