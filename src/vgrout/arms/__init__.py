"""arms"""
