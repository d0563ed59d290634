"""The templates of pages and drawings."""

from __future__ import annotations

import jinja2


def template(name: str, part: str = "inspection") -> jinja2.Template:
    """A template of one part of the package; what it is given is escaped."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader(f"amp_graph.{part}", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(name)
