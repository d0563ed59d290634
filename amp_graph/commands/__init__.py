"""The subcommands of the command line, in the order in which help shows them."""

from amp_graph.commands.export import EXPORT
from amp_graph.commands.lists import LISTS
from amp_graph.commands.numerics import CALIBRATE, COMPARE
from amp_graph.commands.run import RUN
from amp_graph.commands.see import DIFF, DUMP, EXPLAIN

COMMANDS = (EXPLAIN, DUMP, COMPARE, CALIBRATE, DIFF, EXPORT, LISTS, RUN)

__all__ = ["COMMANDS"]
