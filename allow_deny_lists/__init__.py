"""The operator lists as data: one TOML file per colour, and the kernels known to be missing."""
