"""The command line: what can be asked, and how people are answered.

It owns flags, the sorts of their values, settings and sub-commands, the check of their
combinations, help and completion; signals, the standard streams, tables and rows. It does none of
what is asked for, and of the machine it knows only the cores, which `--core-plan` names.
"""
