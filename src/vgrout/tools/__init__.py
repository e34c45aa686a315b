"""Small programs beside the trainer: checking the machine, downloading, grading, exporting, replaying a failed step."""
