"""What the routes of the HTTP process stand on."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from coordinator.api.backend import Backend
from coordinator.api.chat import ChatTemplate
from coordinator.api.errors import ApiError
from coordinator.api.settings import HttpSettings
from coordinator.text.tokenizer import Tokenizer, TokenizerError


@dataclass(frozen=True, slots=True)
class Service:
    """Of one process."""

    settings: HttpSettings
    backend: Backend
    tokenizer: Tokenizer
    template: ChatTemplate
    started: int  # of this process, seconds since 1970
    threads: ThreadPoolExecutor  # one: for what would hold up the event loop

    async def tokens_of(self, encode: Callable[[], list[int]], param: str) -> list[int]:
        """Tokens of a text, made beside the event loop; raises `ApiError`."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.threads, encode)
        except TokenizerError as error:
            raise ApiError(400, f"{param}: {error}", param=param) from None
