"""The stages: annotate, paint, place casts, emit, verify. One file and one function each."""
