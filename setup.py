"""What pyproject.toml cannot say: amp_graph_startup.pth goes to the root of site-packages, where
Python's `site` reads it at start-up.
"""

import os

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

PTH = "amp_graph_startup.pth"


class BuildWithPth(build_py):
    """Puts the .pth file at the root of a wheel."""

    def run(self):
        super().run()
        if not self.editable_mode:
            self.copy_file(PTH, os.path.join(self.build_lib, PTH))

    def get_outputs(self, include_bytecode=True):
        return [*super().get_outputs(include_bytecode), os.path.join(self.build_lib, PTH)]


class EditableWithPth(editable_wheel):
    """Puts it at the root of an editable install. No public way (setuptools 84)."""

    def _run_build_commands(self, dist_name, unpacked_wheel, build_lib, tmp_dir):
        result = super()._run_build_commands(dist_name, unpacked_wheel, build_lib, tmp_dir)
        self.copy_file(PTH, os.path.join(unpacked_wheel, PTH))
        return result


setup(cmdclass={"build_py": BuildWithPth, "editable_wheel": EditableWithPth})
