"""Distillation of a teacher model into a student: MiniLLM and ULD, graded and evaluated as the trainer does."""
