"""iterative_dpo"""
