"""What is known of a job, what may be asked for it, and the words for both: plain, frozen data."""
