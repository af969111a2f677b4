"""A reranker's recipe: the template that makes a prompt of a query and a document, and the labels after it."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.tokenizer.chat.chat_template import ChatTemplate
from services.tokenizer.chat.conversation import Conversation, Message
from services.tokenizer.json.json_values import JsonObject
from services.tokenizer.scores.score_pair import ScorePair

SYSTEM, QUERY, DOCUMENT = "system", "query", "document"
"""The roles that templates of rerankers know: what the instruction, the query and the document are messages of.

Source: sentence-transformers 6.2, `has_pair_roles` in base/modality.py.
"""


@dataclass(frozen=True, slots=True)
class ScoreRecipe:
    """How a model rates pairs.

    Invariant: the template shows queries and documents.
    """

    name: str
    """What `GetModelInfoResponse.score_recipe` says of it."""
    template: ChatTemplate
    label_token_ids: tuple[int, int]
    """The positive label, and the other one."""
    instruction: str = ""
    """What is told the model if the request has no instruction; empty for nothing."""
    takes_instruction: bool = True
    """Whether the template shows an instruction."""
    opens_turn: bool = False
    """The template's `add_generation_prompt`."""
    variables: JsonObject = field(default_factory=dict)
    """Further variables of the template."""

    def pair(self, query: str, document: str, instruction: str = "") -> ScorePair:
        """What to encode for a query and a document; an empty instruction means the recipe's own."""
        instruction = instruction or self.instruction
        told = (Message(SYSTEM, instruction),) if instruction else ()
        messages = (*told, Message(QUERY, query), Message(DOCUMENT, document))
        return ScorePair(self.template, Conversation(messages, variables=self.variables, opens_turn=self.opens_turn))


@dataclass(frozen=True, slots=True)
class Scores:
    """What a model rates pairs by."""

    recipe: ScoreRecipe | None
    problem: str = ""
    """Why there is no recipe, for the client; empty if there is one."""
    owns_template: bool = False
    """Whether the directory's chat template is for pairs alone: it leaves out what a chat's user says."""

    @property
    def name(self) -> str:
        """The recipe's name; empty if there is none."""
        return "" if self.recipe is None else self.recipe.name

    def close(self) -> None:
        """Render nothing any more."""
        if self.recipe is not None:
            self.recipe.template.close()
