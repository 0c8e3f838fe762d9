"""Why a run ends early: the one exception of the engine and of what runs without one."""


class EngineError(Exception):
    """The engine cannot go on; the text is one line, `exit_code` the process's."""

    def __init__(self, exit_code: int, text: str) -> None:
        super().__init__(text)
        self.exit_code = exit_code
