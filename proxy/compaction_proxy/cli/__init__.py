"""The command line. Each sub-command is a module with a ``command``, imported only when it is used."""

from __future__ import annotations

import importlib
import pkgutil

import click

from compaction_proxy import __version__

HELP = {
    "serve": "Run the proxy.",
    "demo": "See a long conversation being compacted: no key, no network.",
    "check": "Check configuration files; all problems at once.",
    "schema": "Print the JSON Schema of the configuration, for editors.",
    "init": "Write a commented starter configuration.",
}
"""The commands in the order of ``--help``, each with its line there."""


class Lazy(click.Group):
    """Finds sub-commands by module name, so that ``check`` imports no server and ``serve`` no demonstration."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        present = {module.name for module in pkgutil.iter_modules(__path__)}
        return [name for name in HELP if name in present]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        found = importlib.import_module(f"{__name__}.{cmd_name}").command
        return found if isinstance(found, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, HELP[name]) for name in self.list_commands(ctx)])


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="compaction-proxy")
def main() -> None:
    """An OpenAI-compatible reverse proxy that compacts long conversations by YAML policy."""
