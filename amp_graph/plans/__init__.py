"""Plans as files: written, read, checked, and pinned to graphs that are captured again."""
