"""direction"""
