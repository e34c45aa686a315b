"""Small programs beside the trainer: checking the machine, downloading, grading, exporting."""
