"""Vocabulary: what prompts are made of. Words that nearly every tokenizer knows as one token, or ids of the server."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from .settings import Form

Piece: TypeAlias = str | tuple[int, ...]
"""Of a prompt: text, or token ids."""

TEXT = (
    "about above across after again against air all almost along also always among and animal another answer any are "
    "area around ask away back base became because become been before began being below best better between big bird "
    "black blue boat body book both box boy bring brought build but call came can car care carry cause change check "
    "children city class clear close cold color come common complete could country course cover cross cut dark day "
    "deep did door down draw dry early earth ease eat end enough even ever every example eye face fact fall family "
    "far farm fast father feel feet few field figure fill final find fine fire first fish five fly follow food foot "
    "for force form found four free friend from front full game gave get girl give go gold good got govern great "
    "green ground group grow had half hand happen hard has have head hear heat help her here high him his hold home "
    "horse hot hour house how hundred idea inch interest island just keep kind king know land language large last "
    "late laugh lead learn leave left less let letter life light like line list listen little live long look lot love "
    "low machine made main make man many map mark may mean measure men might mile mind minute money moon more morning "
    "most mother mountain move much music must name near need never new next night north note nothing notice noun now "
    "number object off often old once one only open order other our out over own page paper part pass pattern people "
    "person picture piece place plain plan plane plant play point power press problem produce product pull put "
    "question quick rain ran reach read ready real record red remember rest right river road rock room round rule run "
    "said same saw say school science sea second see seem self sentence serve set several shape she ship short should "
    "show side simple since sing six size sleep slow small snow some song soon sound south space special spell stand "
    "star start state stay step still stood stop story street strong study such sun sure surface table take talk "
    "teach tell ten test than that the their them then there these they thing think this those thought thousand three "
    "through time together told too took top toward town travel tree true try turn two under unit until upon use "
    "usual very voice vowel wait walk want warm was watch water way week weight well went were west what wheel when "
    "where which while white who whole why will wind with wonder wood word work world would write year yes yet you "
    "young your"
)
"""Every word once: a text to measure a tokenizer with."""
WORDS = tuple(TEXT.split())


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Draws pieces of prompts of about (text) or exactly (ids) so many tokens."""

    form: Form = Form.TEXT
    tokens_per_word: float = 1.0
    """Of running text, measured with the server's own tokenizer where it can be asked."""
    measured: bool = False
    ids: tuple[int, ...] = ()
    """To draw from; needed for ids."""

    @property
    def nothing(self) -> Piece:
        return "" if self.form is Form.TEXT else ()

    def piece(self, draw: Random, tokens: int) -> Piece:
        """``tokens`` of 0 or less: nothing."""
        if tokens <= 0:
            return self.nothing
        if self.form is Form.IDS:
            return tuple(draw.choices(self.ids, k=tokens))
        return " ".join(draw.choices(WORDS, k=max(1, round(tokens / self.tokens_per_word))))
