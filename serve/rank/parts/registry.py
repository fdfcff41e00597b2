"""The parts of an engine: each has its line here, and nothing else imports a part."""

from serve.rank.parts.adapters import part as adapters
from serve.rank.parts.disk import part as disk
from serve.rank.parts.dispatch import Parts
from serve.rank.parts.drafts import part as drafts
from serve.rank.parts.embeddings import part as embeddings
from serve.rank.parts.interface import RankPart, Surroundings

PARTS: list[type[RankPart]] = [
    adapters.AdapterPart,
    disk.DiskPart,
    drafts.DraftsPart,
    embeddings.EmbeddingsPart,
]


def build_parts(surroundings: Surroundings) -> Parts:
    """Builds the parts that an order asks for. Raises ModelError or PlanError."""
    built = [kind.build(surroundings) for kind in PARTS]
    return Parts(part for part in built if part is not None)
