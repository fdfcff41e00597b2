"""The parts of the scheduler: each has its line here, and nothing else imports a part."""

from serve.core.config import ServeConfig
from serve.front.parts.adapters import part as adapters
from serve.front.parts.disk import part as disk
from serve.front.parts.drafts import speculation as drafts
from serve.front.parts.embeddings import part as embeddings
from serve.front.parts.interface import SchedulerPart

# The parts are asked in this order.
PARTS: list[type[SchedulerPart]] = [
    embeddings.EmbeddedPrompts,
    drafts.Speculation,
    disk.DiskPrefixes,
    adapters.AdapterVersions,
]


def make_parts(config: ServeConfig) -> list[SchedulerPart]:
    return [make(config) for make in PARTS]
