"""What all commands share: options, sessions, output, help, progress and errors.

The commands are chapters of `jaxprtool.commands`.
"""
