"""The rules by which nodes get their colours, each with what it says to the user.

Plan files and tables have their names, reports their words.
"""

from __future__ import annotations

import enum


class Rule(enum.StrEnum):
    """The rules that a `Paint` can name.

    words: the sentence for the user, in which `because` is a {node} where it names one. A rule
        without words is told by its name and `because`, such as a group of a list.
    """

    words: str

    def __new__(cls, name: str, words: str = "") -> Rule:
        rule = str.__new__(cls, name)
        rule._value_, rule.words = name, words
        return rule

    __repr__ = str.__repr__

    # From lists.
    LISTED = "listed", "on the {color} list, {entry}"
    FREE = "free", "free to go either way; {side} moves the fewest bytes here"
    MATH_INSIDE = (
        "float32 math inside",
        "computes in float32 on tensors stored either way; {side} moves the fewest bytes",
    )
    UNLISTED = "on no list", "{because} is on no list, and what is on none stays float32"
    # From other nodes.
    DOWNSTREAM = "downstream of", "computes on values of {node}, which is float32 for precision"
    PROMOTED = (
        "promoted by",
        "also reads {node}, which holds full float32, and PyTorch would promote",
    )
    NOTHING_LOW = "nothing low upstream", "nothing in low precision reaches it"
    RESULT = "result of", "is one result of {node}"
    SHARED_MEMORY = (
        "shares memory with",
        "shares memory with {node}, and one piece of memory has one precision",
    )
    SHARED_OUTPUT = "output shares memory with", "is an output that shares memory with {node}"
    WRITES = "writes into", "writes into {node}, memory that belongs to the caller"
    # From what becomes of numbers.
    SATURATES = (
        "saturates",
        "is near a bound, where {dtype} has few numbers, and {node} reads how near",
    )
    ANGLE = (
        "angle of",
        "multiplies few coordinates, and {node} reads the last digits of a large result",
    )
    POSITION = (
        "position for",
        "says where something is, and {node} looks there, which takes all digits",
    )
    LOOKED_UP = (
        "looked up often",
        "looks up {node} so often that gradients would not add up in {dtype}",
    )
    ADDS_UP = "adds up", "its kernels add up as many as {because} numbers in {dtype}"
    READ_BY_MANY = (
        "read by many",
        "has {because} readers, whose gradients would be added up in {dtype}",
    )
    OUT_OF_RANGE = (
        "constant out of range",
        "its constant {because} would become infinite or zero in {dtype}",
    )
    NOT_KNOWN = (
        "number not known",
        "takes a number from {node} that may be beyond the range of {dtype}",
    )
    # From kernels, the model's code, and the user.
    NO_KERNEL = "no kernel", "there is no kernel for {because} in {dtype}"
    AS_CAPTURED = "as captured", "runs as captured: {because}"
    USER_CAST = "user cast", "the model's own code converts to float32 here"
    OVERRIDE = "override", "overridden by the user: {because}"
    EDITED = "saved in the plan"
    CALIBRATED = "calibrated"


OPEN = (Rule.FREE, Rule.MATH_INSIDE)  # whose nodes go as casts are cheapest
WORDS = {str(rule): rule.words for rule in Rule}
