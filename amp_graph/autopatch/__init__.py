"""AMP_GRAPH_ENABLE=1 python train.py: convert the models of a script that never heard of us."""

from amp_graph.autopatch.install import Installation, enable, install, start
from amp_graph.autopatch.settings import Settings

__all__ = ["Installation", "Settings", "enable", "install", "start"]
