"""Capture: from a module to one ATen graph whose nodes know dtype, shape, module and line."""
