"""The stages, a file with one public function each: annotate, paint, split attention, place casts,
emit, verify, lift weights; and what several of them look at."""
