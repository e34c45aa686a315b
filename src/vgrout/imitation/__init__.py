"""Imitation and preference beside the trainer: distillation (MiniLLM, ULD) and iterative DPO."""
