"""Starts amp_graph once torch is imported. Loaded by amp_graph_startup.pth, and only where
AMP_GRAPH_ENABLE is set; before that it imports nothing that Python has not imported by then, so
that a script which never needs torch does not wait for it.
"""

import atexit
import os
import sys

OFF = ("", "0", "false", "no", "off")  # as `NO` in amp_graph.autopatch.settings


class _AfterTorch:
    """A finder that finds torch as the others would, and has something run right after its import;
    if amp_graph is what imports it, right after that. Many a library looks for torch without
    importing it, so the finder stays until then."""

    is_asking_the_others = False

    def find_spec(self, name, path=None, target=None):
        if name not in ("torch", "amp_graph") or self.is_asking_the_others:
            return None
        import importlib.util

        self.is_asking_the_others = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_asking_the_others = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                del spec.loader.exec_module
                execute(module)
                if name == "amp_graph" or "amp_graph" not in sys.modules:
                    sys.meta_path.remove(self)
                    _start()

            spec.loader.exec_module = exec_module
        return spec


def _end_as_interrupted():
    """Have Python end by SIGINT a script that KeyboardInterrupt ended, which a shell's loop over
    scripts goes by. Python (3.11) forgets that it is to once a handler at its exit evaluates text,
    as our dump does, and Dynamo's where tabulate is installed; and is reminded in the same way."""
    is_interactive = hasattr(sys, "ps1")  # there, the error of a line that is long over
    if getattr(sys, "last_type", None) is KeyboardInterrupt and not is_interactive:
        import contextlib

        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def _start():
    atexit.register(_end_as_interrupted)  # before all others, so that it runs after them
    try:
        from amp_graph.autopatch import start

        start()
    except Exception as error:
        print(
            f"amp_graph: cannot start, the script runs unchanged ({type(error).__name__}: {error})",
            file=sys.stderr,
        )


if os.environ.get("AMP_GRAPH_ENABLE", "").strip().lower() not in OFF:
    if "torch" in sys.modules:
        _start()
    else:
        sys.meta_path.insert(0, _AfterTorch())
