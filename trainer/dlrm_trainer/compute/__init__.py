"""What compiled loops share: this processor, a team of threads, sizes as types, a hash."""
