"""Python functions checked by assertions, in a sandbox, under one of several flawed graders."""
