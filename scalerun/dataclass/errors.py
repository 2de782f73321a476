"""What a user can get wrong. The command-line entry points print these as one sentence."""


class UserError(ValueError):
    """Something outside the program is wrong: a file, a folder, a checkpoint, a record.

    The message is one sentence that names the flag or the file and line, what was found there, and
    what to do. The commands print it without a traceback and end with exit code 1.

    Args:
        param: the field that it is about, for clients that give fields and not flags; None where
            no single one is to blame.
    """

    exit_code = 1

    def __init__(self, *args: object, param: str | None = None) -> None:
        super().__init__(*args)
        self.param = param


class ConfigError(UserError):
    """The command itself is wrong: an unknown flag, a bad value, settings that contradict.

    The commands end with exit code 2.
    """

    exit_code = 2
