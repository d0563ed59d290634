"""The text view of a plan, on plans written by hand. `EXPECTTEST_ACCEPT=1` renews the texts."""

# ruff: noqa: E501

import torch
from expecttest import assert_expected_inline
from torch import nn

import amp_graph
from amp_graph.inspection.plan_text import render
from amp_graph.inspection.source import annotated_model
from amp_graph.ir import Cast, Color, NodeFacts, Paint, Plan, TensorFacts


def node(name, op, shape=(64, 32), reads=(), *, dtype=torch.float32, **facts):
    tensor = TensorFacts(dtype, shape, "cpu", numel=1)
    tensors = () if op == "output" else (tensor,)
    facts = {"operands": tuple(reads), **facts}
    return NodeFacts(name, op, reads=tuple(reads), tensors=tensors, memory=name, **facts)


def plan_of(*nodes, **fields):
    return Plan(torch.bfloat16, facts={n.name: n for n in nodes}, **fields)


def plain(plan):
    """Without the spaces at line ends, which editors strip from expected texts too."""
    return "\n".join(line.rstrip() for line in render(plan).splitlines()) + "\n"


def classifier():
    weight = "l_self_modules_head_modules_fc_parameters_weight_"
    return plan_of(
        node("l_x_", "placeholder"),
        node(
            weight,
            "placeholder",
            (10, 32),
            is_parameter=True,
            called="head.fc.weight",
            module_path="head.fc",
        ),
        node(
            "linear",
            "aten.linear.default",
            (64, 10),
            ("l_x_", weight),
            color=Color.ALLOW,
            module_path="head.fc",
            source="net.py:12 in forward",
        ),
        node("mul", "aten.mul.Tensor", (64, 10), ("linear",), color=Color.INFER, scalars=(0.125,)),
        node(
            "softmax",
            "aten.softmax.int",
            (64, 10),
            ("mul",),
            color=Color.DENY,
            source="net.py:13 in forward",
        ),
        node("argmax", "aten.argmax.default", (64,), ("softmax",), dtype=torch.int64),
        node("output", "output", (), ("softmax",)),
        paints={
            "l_x_": Paint(Color.KEEP, "as captured", "placeholder"),
            weight: Paint(Color.KEEP, "as captured", "placeholder"),
            "linear": Paint(Color.ALLOW, "listed", "matmul"),
            "mul": Paint(Color.INFER, "free"),
            "softmax": Paint(Color.DENY, "listed", "softmax"),
            "argmax": Paint(Color.DENY, "on no list", "aten.argmax.default"),
            "output": Paint(Color.KEEP, "as captured", "output"),
        },
        low=frozenset({"linear", "mul"}),
        casts=(
            Cast("l_x_", torch.bfloat16, ("linear",), 64 * 32 * 6),
            Cast(weight, torch.bfloat16, ("linear",), 10 * 32 * 6),
            Cast("mul", torch.float32, ("softmax",), 64 * 10 * 6),
        ),
    )


def test_a_classifier_reads_like_code():
    assert_expected_inline(
        plain(classifier()),
        """\
graph in bfloat16: 7 nodes
  allow         1 of 1 in bfloat16
  infer         1 of 1 in bfloat16
  deny          0 of 2 in bfloat16
  casts         3, moving 17.6 KiB
  on no list    aten.argmax (float32 as captured)

colour  precision  node                                        shape     module   line       why
------  ---------  ------------------------------------------  --------  -------  ---------  -------------------------------
keep    float32    l_x_ = input                                (64, 32)                      as captured: placeholder
keep    float32    head.fc.weight = parameter                  (10, 32)  head.fc             as captured: placeholder
        cast       l_x_ -> bfloat16 for linear                 12.0 KiB
        cast       head.fc.weight -> bfloat16 for linear       1.9 KiB
allow   bfloat16   linear = aten.linear(l_x_, head.fc.weight)  (64, 10)  head.fc  net.py:12  listed: matmul
infer   bfloat16   mul = aten.mul.Tensor(linear, 0.125)        (64, 10)                      free
        cast       mul -> float32 for softmax                  3.8 KiB
deny    float32    softmax = aten.softmax.int(mul)             (64, 10)           net.py:13  listed: softmax
deny    float32    argmax = aten.argmax(softmax)               (64)                          on no list: aten.argmax.default
keep               return softmax                                                            as captured: output
""",
    )


def test_a_body_follows_the_node_that_holds_it():
    body = plan_of(
        node("x", "placeholder"),
        node("mm", "aten.mm.default", reads=("x", "x"), color=Color.ALLOW),
        node("output", "output", (), ("mm",)),
        paints={"mm": Paint(Color.ALLOW, "listed", "matmul")},
        low=frozenset({"mm"}),
        casts=(
            Cast("x", torch.bfloat16, ("mm",), 12288),
            Cast("mm", torch.float32, ("output",), 12288),
        ),
    )
    plan = plan_of(
        node("x", "placeholder"),
        NodeFacts("wrap_body_0", "get_attr"),
        node("checkpoint", "tag_activation_checkpoint", reads=("x",), fixed="higher-order"),
        node("output", "output", (), ("checkpoint",)),
        bodies={"wrap_body_0": body},
    )
    assert_expected_inline(
        plain(plan),
        """\
graph in bfloat16: 4 nodes
  casts         0, moving 0 B
  inner graphs  wrap_body_0; casts moving 24.0 KiB

colour  precision  node                                       shape     module  line  why
------  ---------  -----------------------------------------  --------  ------  ----  ---
        float32    x = input                                  (64, 32)
                   wrap_body_0 = inner graph

    wrap_body_0:
    graph in bfloat16: 3 nodes
      allow         1 of 1 in bfloat16
      casts         2, moving 24.0 KiB

    colour  precision  node                      shape     module  line  why
    ------  ---------  ------------------------  --------  ------  ----  --------------
            float32    x = input                 (64, 32)
            cast       x -> bfloat16 for mm      12.0 KiB
    allow   bfloat16   mm = aten.mm(x, x)        (64, 32)                listed: matmul
            cast       mm -> float32 for output  12.0 KiB
                       return mm

        float32    checkpoint = tag_activation_checkpoint(x)  (64, 32)
                   return checkpoint
""",
    )


def test_a_graph_left_as_captured_says_why():
    plan = plan_of(
        node("x", "placeholder"), fallback="verify: 'mm' reads both bfloat16 and float32"
    )
    assert_expected_inline(
        plain(plan),
        """\
graph in bfloat16: 1 node
  fallback      runs as captured: verify: 'mm' reads both bfloat16 and float32
  casts         0, moving 0 B

colour  precision  node       shape     module  line  why
------  ---------  ---------  --------  ------  ----  ---
        float32    x = input  (64, 32)
""",
    )


def test_all_operands_are_written():
    """Also whole numbers, and what a kernel does not compute on in the precision of the rest."""
    plan = plan_of(
        node("x", "placeholder"),
        node("steps", "placeholder", (), dtype=torch.int64),
        node(
            "add_", "aten.add_.Tensor", (), operands=("steps",), dtype=torch.int64, scalars=(1.0,)
        ),
        node("norm", "aten.batch_norm.default", reads=("x",), operands=("x", "weight")),
        node("output", "output", (), ("norm",), operands=("norm", "add_")),
    )
    text = plain(plan)
    for call in ("aten.add_.Tensor(steps, 1)", "aten.batch_norm(x, weight)", "return norm, add_"):
        assert call in text


def test_long_operand_lists_and_many_readers_are_cut():
    inputs = [node(f"hidden_states_{i}", "placeholder") for i in range(12)]
    plan = plan_of(
        *inputs,
        node("stack", "aten.stack.default", (12, 64, 32), [n.name for n in inputs]),
        casts=(Cast("hidden_states_0", torch.float16, ("d", "c", "b", "stack"), 6 << 20, True),),
    )
    lines = plain(plan).splitlines()
    assert_expected_inline(
        "\n".join(lines[:4] + lines[-2:]),
        """\
graph in bfloat16: 13 nodes
  casts         1, moving 6.0 MiB

colour  precision  node                                                               shape         module  line  why
        cast       hidden_states_0 -> float16 for stack, d and 2 more                 6.0 MiB                     saturating
        float32    stack = aten.stack(hidden_states_0, hidden_states_1, ... 10 more)  (12, 64, 32)""",
    )


def test_symbolic_shapes_and_several_results():
    pair = (
        TensorFacts(torch.float32, ("s0", 8), "cpu", 64),
        TensorFacts(torch.float32, ("s0", 8), "cpu", 64),
    )
    chunk = NodeFacts("chunk", "aten.chunk.default", operands=("x",), tensors=pair, memory="x")
    plan = plan_of(node("x", "placeholder", ("s0", 16)), chunk)
    assert_expected_inline(
        plain(plan),
        """\
graph in bfloat16: 2 nodes
  casts         0, moving 0 B

colour  precision  node                   shape               module  line  why
------  ---------  ---------------------  ------------------  ------  ----  ---
        float32    x = input              (s0, 16)
        float32    chunk = aten.chunk(x)  (s0, 8) and 1 more
""",
    )


def test_an_empty_plan():
    assert_expected_inline(
        plain(plan_of()),
        """\
graph in bfloat16: 0 nodes
  casts         0, moving 0 B
""",
    )


def test_every_line_is_free_of_trailing_spaces():
    assert all(line == line.rstrip() for line in render(classifier()).splitlines())


class Owner(nn.Module):
    """Modules that read parameters of others, with names that Dynamo spells otherwise."""

    def __init__(self):
        super().__init__()
        self.Encoder = nn.TransformerEncoderLayer(
            8, 2, 16, batch_first=True
        )  # reads all of its own
        self.by_name = nn.ModuleDict({"a_modules_b": nn.Linear(8, 8)})
        self.table, self.scale = nn.Embedding(8, 8), nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(11))

    def forward(self, x):
        x = self.layers[10](self.layers[1](self.Encoder(x))) * self.scale
        return nn.functional.linear(self.by_name["a_modules_b"](x), self.table.weight)


def test_parameters_are_shown_by_their_paths(fresh_dynamo):
    model = amp_graph.convert(Owner().eval())
    with torch.no_grad():
        model(torch.randn(2, 3, 8))
    (plan,) = amp_graph.plans(model)
    shown = {f.label for f in plan.facts.values() if f.is_parameter}
    used = {name for name, _ in model.named_parameters() if not name.startswith("layers")}
    assert shown == used | {f"layers.{i}.{name}" for i in (1, 10) for name in ("weight", "bias")}


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, values):
        hidden = self.layer(values)
        self.mean.add_(hidden.mean(0))
        return hidden * self.scale


def test_reasons_and_modules_by_the_names_that_people_know():
    model = amp_graph.convert(nn.Sequential(Buffered()), policy="bfloat16")
    model(torch.randn(2, 4))
    (plan,) = amp_graph.plans(model)
    text = render(plan)
    assert "writes into: 0.mean" in text and "promoted by: 0.scale" in text
    table = [line.split() for line in text.splitlines()]
    assert [row for row in table if "0" in row and "input" in row] == []
    (given,) = (n for n in annotated_model(model).after[0].nodes if n.kind == "input")
    assert given.module == ""
