"""The stages, a file with one public function each: annotate, paint, split attention, place casts,
emit, verify; then lift weights and results, let results leave early, scale inside; and what several
of them look at."""
