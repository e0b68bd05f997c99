"""Which all-reduces are gradients, where their shapes come from, and how they are put into sections."""

from __future__ import annotations

import pytest
from builders import (
    BOOL,
    DOUBLE,
    FLOAT,
    HALF,
    INT32,
    INT64,
    RESOURCE,
    STRING,
    WORLD,
    Nodes,
    Shape,
    Shapes,
    Type,
    gradients_graph,
    gradients_of,
    index_of,
    indexed,
    random_graph,
)
from hypothesis import given
from hypothesis import strategies as st

from graph_passes.errors import GraphError, ReductionError
from graph_passes.find import Find
from graph_passes.messages import GraphDef
from graph_passes.order import breadth_first_order
from graph_passes.pipeline import GraphItem
from graph_passes.sections import GradientId, Reason
from graph_passes.variables import updated_variable


def one(**attrs: object) -> GraphDef:
    """An all-reduce of a [2,3] placeholder, with these attributes."""
    nodes = Nodes()
    nodes.gradient("ar", [2, 3], **attrs)
    return nodes.graph_def


def several(count: int, **attrs: object) -> GraphDef:
    nodes = Nodes()
    for number in range(count):
        nodes.gradient(f"ar_{number}", [2, 3], **attrs)
    return nodes.graph_def


def reasons(graph_def: GraphDef) -> dict[str, Reason]:
    return {single.id.name: single.reason for single in indexed(graph_def).singles}


def section_names(graph_def: GraphDef) -> list[list[str]]:
    return [[gradient.name for gradient in section.gradients] for section in indexed(graph_def).sections]


# --------------------------------------------------------------------------------------------- what is found


def test_a_gradient_is_known_with_all_that_matters():
    nodes = Nodes()
    nodes.placeholder("g", [3, 4], HALF)
    nodes.all_reduce("scope/ar", "g:0", "^g", dtype=HALF, group="some", reduction="max", fusion=0, device="/gpu:1")

    gradient = gradients_of(nodes.graph_def)["scope/ar"]

    assert gradient.tensor == "g:0"
    assert (gradient.group, gradient.reduction, gradient.fusion, gradient.fusion_id) == ("some", "max", 0, -1)
    assert (gradient.dtype, gradient.shape, gradient.elements, gradient.size_bytes) == (HALF, (3, 4), 12, 24)
    assert (gradient.device, gradient.frame, gradient.graph) == ("/device:GPU:1", "", "")


def test_fusion_and_its_id_have_defaults():
    gradient = gradients_of(one(fusion=None, fusion_id=None))["ar"]
    assert (gradient.fusion, gradient.fusion_id) == (1, -1)


@given(st.integers(0, 10**6), st.integers(1, 40))
def test_gradients_come_in_the_breadth_first_order(seed, size):
    graph_def = random_graph(seed, size)
    for node in graph_def.node:
        if node.op == "HcomAllReduce":
            for key, value in {"reduction": b"sum", "group": b"g"}.items():
                node.attr[key].s = value
            node.attr["T"].type = FLOAT
    if not any(node.op == "HcomAllReduce" for node in graph_def.node):
        return
    graph = index_of(graph_def)
    order = breadth_first_order(graph)

    found = Find().run(GraphItem(graph_def)).item.gradients

    expected = [number for number in order if graph.ops[number] == "HcomAllReduce"]
    assert [gradient.node for gradient in found] == expected
    assert [order[gradient.rank] for gradient in found] == expected


def test_functions_are_graphs_of_their_own():
    nodes = Nodes()
    nodes.gradient("ar", [2])
    body = nodes.function("f", {"x": FLOAT}, {"y": (FLOAT, "ar:output:0")})
    body.constant("c", [1.0, 2.0])
    body.all_reduce("ar", "c:output:0")
    body.all_reduce("other", "x")
    item = Find().run(GraphItem(nodes.graph_def)).item

    assert [str(gradient.id) for gradient in item.gradients] == ["ar", "f/other", "f/ar"]
    assert {str(gradient.id): gradient.shape for gradient in item.gradients} == {
        "ar": (2,), "f/ar": (2,), "f/other": None,
    }  # fmt: skip
    assert len(item.graphs) == len(item.orders) == 2


def test_a_graph_without_any_all_reduce_says_what_was_looked_for():
    nodes = Nodes()
    nodes.placeholder("x", [1])
    with pytest.raises(GraphError, match=r"no all-reduce, found 1 nodes, none of op HcomAllReduce, expected .*; try"):
        Find().run(GraphItem(nodes.graph_def))


def test_a_lowered_graph_has_none_left_which_may_be_allowed():
    nodes = Nodes()
    nodes.placeholder("x", [1])
    nodes.add("m", "Mul", "x", "x", T=Type(FLOAT), _hccl_group=WORLD, _hccl_reduction="sum")
    with pytest.raises(GraphError, match="1 reductions that were lowered before"):
        Find().run(GraphItem(nodes.graph_def))
    assert Find(allow_lowered=True).run(GraphItem(nodes.graph_def)).item.gradients == ()


@pytest.mark.parametrize(
    ("inputs", "found"),
    [(["g", "g"], r"\['g', 'g'\]"), (["^g"], r"\['\^g'\]"), ([], r"\[\]"), (["^g", "g"], r"\['\^g', 'g'\]")],
)
def test_an_all_reduce_has_exactly_one_tensor(inputs, found):
    nodes = Nodes()
    nodes.placeholder("g", [1])
    nodes.add("ar", "HcomAllReduce", *inputs, T=Type(FLOAT), group=WORLD, reduction="sum")
    with pytest.raises(ReductionError, match=f"wrong number of inputs, node ar, found {found}"):
        Find().run(GraphItem(nodes.graph_def))


@pytest.mark.parametrize("dtype", [STRING, RESOURCE, 99])
def test_a_type_without_numbers_cannot_be_reduced(dtype):
    with pytest.raises(ReductionError, match="a type that cannot be reduced, node ar"):
        Find().run(GraphItem(one(T=Type(dtype))))


def test_errors_in_functions_name_the_function():
    nodes = Nodes()
    nodes.function("f", {"x": FLOAT}, {}).all_reduce("ar", "x", group=None)
    with pytest.raises(ReductionError, match="node ar of function f"):
        Find().run(GraphItem(nodes.graph_def))


# ------------------------------------------------------------------------------------- the table of hccl.md §3


@pytest.mark.parametrize("name", ["reduction", "group"])
@pytest.mark.parametrize("value", [None, ""], ids=["missing", "empty"])
def test_row_1_reduction_and_group_must_be_there_before_anything_else(name, value):
    attrs = {name: value, "fusion": 7}
    with pytest.raises(ReductionError, match=f"attribute {name} is missing or empty, node ar"):
        indexed(one(**attrs))


@pytest.mark.parametrize(
    ("name", "value"),
    [("reduction", 1), ("group", Type(FLOAT)), ("fusion", "1"), ("fusion_id", 1.5), ("fusion", True), ("T", 1)],
)
def test_row_1_an_attribute_of_another_type_is_an_error(name, value):
    with pytest.raises(ReductionError, match=f"attribute {name} has the wrong type, node ar"):
        indexed(one(**{name: value}))


@pytest.mark.parametrize("attrs", [{}, {"fusion": 3}, {"fusion": 0}, {"reduction": "min"}, {"fusion_id": 5}])
def test_row_2_an_unknown_shape_comes_before_all_that_follows(attrs):
    nodes = Nodes()
    nodes.placeholder("g", [-1, 4])
    nodes.all_reduce("ar", "g", **attrs)
    assert reasons(nodes.graph_def) == {"ar": Reason.UNKNOWN_SHAPE}


@pytest.mark.parametrize("reduction", ["min", "max", "prod", "mean"])
@pytest.mark.parametrize("attrs", [{}, {"fusion": 3}, {"fusion": 0}, {"fusion_id": 5}])
def test_row_3_another_reduction_comes_before_fusion(reduction, attrs):
    assert reasons(one(reduction=reduction, **attrs)) == {"ar": Reason.REDUCTION}


@pytest.mark.parametrize("fusion_id", [-1, 5])
def test_row_4_fusion_0_is_single_whatever_its_id(fusion_id):
    assert reasons(several(2, fusion=0, fusion_id=fusion_id)) == {"ar_0": Reason.FUSION_0, "ar_1": Reason.FUSION_0}


@pytest.mark.parametrize(
    ("fusion", "fusion_id", "found"),
    [
        (1, 0, "fusion 1 with fusion_id 0"),
        (1, -2, "fusion 1 with fusion_id -2"),
        (2, -1, "fusion 2 with fusion_id -1"),
        (2, 2**31, "fusion 2 with fusion_id 2147483648"),
        (3, -1, "fusion 3"),
        (-1, -1, "fusion -1"),
    ],
)
def test_row_5_an_illegal_fusion_is_an_error(fusion, fusion_id, found):
    with pytest.raises(ReductionError, match=f"an illegal fusion, node ar, .*found {found}, expected"):
        indexed(one(fusion=fusion, fusion_id=fusion_id))


@pytest.mark.parametrize("fusion_id", [0, 2**31 - 1])
def test_row_6_fusion_2_is_a_section_of_its_own_by_id(fusion_id):
    item = indexed(several(2, fusion=2, fusion_id=fusion_id))
    (section,) = item.sections
    assert section.key.fusion_id == fusion_id
    assert not section.takes_strategy


def test_a_section_of_one_is_alone():
    graph_def = several(2)
    Nodes(graph_def.node).gradient("other", [2], group="some")
    assert reasons(graph_def) == {"other": Reason.ALONE}
    assert section_names(graph_def) == [["ar_0", "ar_1"]]


def test_each_key_is_a_section_with_indices_of_its_own():
    nodes = Nodes()
    kinds = [{}, {"dtype": DOUBLE}, {"group": "some"}, {"fusion": 2, "fusion_id": 3}, {"fusion": 2, "fusion_id": 4}]
    for number in range(3):
        for kind, attrs in enumerate(kinds):
            nodes.gradient(f"ar_{number}_{kind}", [2], **attrs)

    assert sorted(section_names(nodes.graph_def)) == [
        [f"ar_{number}_{kind}" for number in range(3)] for kind in range(len(kinds))
    ]
    assert indexed(nodes.graph_def).singles == ()


def test_gradients_of_different_functions_are_in_different_sections():
    nodes = Nodes()
    for name in ("f", "g"):
        body = nodes.function(name, {"x": FLOAT}, {})
        body.constant("c", [1.0])
        for number in range(2):
            body.all_reduce(f"ar_{number}", "c:output:0")
    sections = indexed(nodes.graph_def).sections
    assert [section.key.graph for section in sections] == ["f", "g"]


def test_a_gradient_inside_a_loop_is_single():
    nodes = Nodes()
    nodes.placeholder("x", [2])
    nodes.add("enter", "Enter", "x", frame_name="loop", T=Type(FLOAT))
    nodes.add("merge", "Merge", "enter", "next", N=2)
    nodes.add("switch", "Switch", "merge", "merge:1")
    nodes.identity("body", "switch:1", _output_shapes=Shapes([(2,)]))
    nodes.all_reduce("inside", "body")
    nodes.add("next", "NextIteration", "inside")
    nodes.add("exit", "Exit", "switch")
    nodes.identity("after", "exit", _output_shapes=Shapes([(2,)]))
    nodes.all_reduce("outside", "after")
    nodes.all_reduce("beside", "x")

    assert reasons(nodes.graph_def) == {"inside": Reason.FRAME}
    assert section_names(nodes.graph_def) == [["beside", "outside"]]


def test_nested_loops_are_left_one_at_a_time():
    nodes = Nodes()
    nodes.placeholder("x", [2])
    nodes.add("outer", "Enter", "x", frame_name="outer")
    nodes.add("inner", "Enter", "outer", frame_name="inner")
    nodes.add("leave_inner", "Exit", "inner")
    nodes.add("leave_outer", "Exit", "leave_inner")
    for name, tensor in [("a", "inner"), ("b", "leave_inner"), ("c", "leave_outer")]:
        nodes.all_reduce(name, tensor, _output_shapes=Shapes([(2,)]))

    frames = {gradient.name: gradient.frame for gradient in gradients_of(nodes.graph_def).values()}
    assert frames == {"a": "outer/inner", "b": "outer", "c": ""}


# -------------------------------------------------------------------------------------------- shapes, by source


def shape_of(nodes: Nodes, tensor: str, **attrs: object) -> tuple[int, ...] | None:
    nodes.all_reduce("ar", tensor, **attrs)
    return gradients_of(nodes.graph_def)["ar"].shape


def tensor_of_unknown_shape(nodes: Nodes) -> str:
    return nodes.add("mystery", "SomeOp", _T=Type(FLOAT))


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [([(2, 3)], (2, 3)), ([()], ()), ([(0, 3)], (0, 3)), ([(-1, 3)], None), ([None], None), ([], None)],
)
def test_a_shape_declared_by_the_all_reduce(shapes, expected):
    nodes = Nodes()
    assert shape_of(nodes, tensor_of_unknown_shape(nodes), _output_shapes=Shapes(shapes)) == expected


@pytest.mark.parametrize(("port", "expected"), [("", (1,)), (":0", (1,)), (":1", (2,)), (":2", None), (":3", None)])
def test_a_shape_declared_by_the_producer(port, expected):
    nodes = Nodes()
    nodes.add("many", "SomeOp", _output_shapes=Shapes([(1,), (2,), None]))
    assert shape_of(nodes, f"many{port}") == expected


def test_a_shape_declared_by_a_producer_in_a_function_by_the_name_of_its_output():
    """`bn:scale_backprop:0` is the second output, not the first."""
    nodes = Nodes()
    body = nodes.function("f", {"x": FLOAT}, {})
    shapes = Shapes([(2, 2, 2, 3), (3,), (3,), None, None])
    body.add("bn", "FusedBatchNormGradV3", *"xxxxxx", T=Type(FLOAT), U=Type(FLOAT), _output_shapes=shapes)
    body.add("split", "SplitV", *"xxx", num_split=2, T=Type(FLOAT), _output_shapes=Shapes([(4,), (5,)]))
    body.add("unknown", "SomeOp", _output_shapes=Shapes([(6,), (7,)]))
    for name, tensor in {
        "a": "bn:x_backprop:0", "b": "bn:scale_backprop:0", "c": "split:output:1", "d": "unknown:y:0",
    }.items():  # fmt: skip
        body.all_reduce(name, tensor)

    shapes_found = {name: gradient.shape for name, gradient in gradients_of(nodes.graph_def).items()}
    assert shapes_found == {"a": (2, 2, 2, 3), "b": (3,), "c": (5,), "d": None}


def variable(nodes: Nodes, name: str, shape: tuple[int, ...], *, is_resource: bool, dtype: int = FLOAT) -> str:
    op = "VarHandleOp" if is_resource else "VariableV2"
    return nodes.add(name, op, dtype=Type(dtype), shape=Shape(shape))


@pytest.mark.parametrize("is_resource", [False, True], ids=["reference", "resource"])
@pytest.mark.parametrize(
    "steps",
    [
        [],
        ["RealDiv"],
        ["Mul"],
        ["Cast"],
        ["Cast", "RealDiv", "Cast"],
        ["ClipByValue"],
        ["Maximum", "Minimum"],
        ["CheckNumerics", "Identity"],
        ["Mul", "Mul", "AddN"],
    ],
    ids="-".join,
)
def test_the_shape_of_the_variable_that_is_updated(is_resource, steps):
    """From the all-reduce through scaling, clipping and casts to the training op."""
    nodes = Nodes()
    nodes.all_reduce("ar", tensor_of_unknown_shape(nodes))
    variable(nodes, "w", (7, 5), is_resource=is_resource)
    nodes.constant("lr", 0.1)
    tensor = "ar"
    for number, op in enumerate(steps):
        tensor = nodes.add(f"step_{number}", op, tensor, *(["lr"] if op in ("RealDiv", "Mul", "Maximum") else []))
    op = "ResourceApplyGradientDescent" if is_resource else "ApplyGradientDescent"
    nodes.add("train", op, "w", "lr", tensor, T=Type(FLOAT))

    gradient = gradients_of(nodes.graph_def)["ar"]

    assert (gradient.shape, gradient.variable) == ((7, 5), "w")


@pytest.mark.parametrize(
    ("op", "before", "after"),
    [
        ("ApplyMomentum", ["w", "w", "lr"], ["lr"]),
        ("ResourceApplyMomentum", ["w", "w", "lr"], ["lr"]),
        ("ResourceApplyKerasMomentum", ["w", "w", "lr"], ["lr"]),
        ("ResourceApplyAdam", ["w", *["lr"] * 8], []),
        ("ApplyRMSProp", ["w", *["lr"] * 6], []),
        ("SparseApplyAdagrad", ["w", "w", "lr"], ["lr"]),
        ("ResourceSparseApplyMomentum", ["w", "w", "lr"], ["lr", "lr"]),
        ("AssignSub", ["w"], []),
        ("AssignAddVariableOp", ["w"], []),
    ],
)
def test_the_gradient_input_of_each_training_op(op, before, after):
    nodes = Nodes()
    nodes.all_reduce("ar", tensor_of_unknown_shape(nodes))
    variable(nodes, "w", (4,), is_resource="Resource" in op or "VariableOp" in op)
    nodes.constant("lr", 0.1)
    nodes.add("train", op, *before, "ar", *after)
    assert gradients_of(nodes.graph_def)["ar"].variable == "w"


def test_a_gradient_given_as_anything_but_the_gradient_updates_nothing():
    nodes = Nodes()
    nodes.all_reduce("ar", nodes.placeholder("g", []))
    variable(nodes, "w", (4,), is_resource=False)
    nodes.add("train", "ApplyGradientDescent", "w", "ar", "w")
    nodes.add("later", "ApplyGradientDescent", "w", "w", "w", "^ar")
    gradient = gradients_of(nodes.graph_def)["ar"]
    assert (gradient.shape, gradient.variable) == ((), None)


def test_a_training_op_wins_over_assignments_to_slots():
    nodes = Nodes()
    nodes.all_reduce("ar", tensor_of_unknown_shape(nodes))
    for name in ("slot", "w"):
        variable(nodes, name, (4,), is_resource=False)
    nodes.add("accumulate", "AssignAdd", "slot", "ar")
    nodes.add("train", "ApplyGradientDescent", "w", "w", "ar")
    assert gradients_of(nodes.graph_def)["ar"].variable == "w"


def test_a_tensor_that_updates_two_variables_is_no_ones_gradient():
    nodes = Nodes()
    nodes.all_reduce("ar", nodes.placeholder("g", [4]))
    for name in ("v", "w"):
        variable(nodes, name, (9,), is_resource=False)
        nodes.add(f"train_{name}", "ApplyGradientDescent", name, name, "ar")
    gradient = gradients_of(nodes.graph_def)["ar"]
    assert (gradient.shape, gradient.variable) == ((4,), None)


def test_a_search_without_end_is_given_up():
    nodes = Nodes()
    tensor = nodes.all_reduce("ar", nodes.placeholder("g", [1]))
    for number in range(1000):
        tensor = nodes.identity(f"i{number}", tensor)
    variable(nodes, "w", (1,), is_resource=False)
    nodes.add("train", "ApplyGradientDescent", "w", "w", tensor)
    graph = index_of(nodes.graph_def)
    assert updated_variable(graph, graph.ids["ar"]) is None


def sizes(nodes: Nodes, values: list[int], dtype: int = INT32) -> str:
    return nodes.constant("sizes", values, dtype)


@pytest.mark.parametrize("dtype", [INT32, INT64])
@pytest.mark.parametrize(
    ("op", "position"),
    [
        ("Reshape", 1),
        ("BroadcastTo", 1),
        ("Fill", 0),
        ("RandomUniform", 0),
        ("RandomStandardNormal", 0),
        ("TruncatedNormal", 0),
        ("Conv3DBackpropFilterV2", 1),
        ("Conv3DBackpropInputV2", 0),
        ("DepthwiseConv2dNativeBackpropInput", 0),
        ("Conv2DBackpropFilter", 1),
        ("Conv2DBackpropInput", 0),
        ("DepthwiseConv2dNativeBackpropFilter", 1),
    ],
)
def test_a_shape_given_as_an_input(op, position, dtype):
    nodes = Nodes()
    inputs = ["mystery"] * 3
    tensor_of_unknown_shape(nodes)
    inputs[position] = sizes(nodes, [3, 1, 2], dtype)
    nodes.add("g", op, *inputs)
    assert shape_of(nodes, "g") == (3, 1, 2)


@pytest.mark.parametrize(("values", "expected"), [([-1, 2], None), ([], ()), ([0], (0,))])
def test_a_reshape_with_a_free_dimension_tells_nothing(values, expected):
    nodes = Nodes()
    nodes.add("g", "Reshape", tensor_of_unknown_shape(nodes), sizes(nodes, values))
    assert shape_of(nodes, "g") == expected


@pytest.mark.parametrize(
    ("op", "shapes", "expected"),
    [
        ("Identity", [(2, 3)], (2, 3)),
        ("Cast", [(2, 3)], (2, 3)),
        ("AddN", [(2, 3), (2, 3)], (2, 3)),
        ("Mul", [(2, 3), ()], (2, 3)),
        ("RealDiv", [(), (2, 3)], (2, 3)),
        ("Mul", [(2, 3), (1, 3)], None),
        ("AddV2", [(2, 3), None], None),
        ("Mul", [(), ()], ()),
        ("ReluGrad", [(2, 3), (2, 3)], (2, 3)),
        ("MatMul", [(2, 3), (3, 4)], None),
    ],
)
def test_a_shape_through_ops_that_keep_it(op, shapes, expected):
    nodes = Nodes()
    inputs = []
    for number, shape in enumerate(shapes):
        unknown = shape is None
        inputs.append(nodes.add(f"m{number}", "SomeOp") if unknown else nodes.placeholder(f"p{number}", shape))
    nodes.add("g", op, *inputs)
    assert shape_of(nodes, "g") == expected


def test_the_ops_that_carry_their_own_shape():
    nodes = Nodes()
    nodes.constant("c", [[1.0, 2.0]])
    nodes.add("it", "IteratorGetNext", output_shapes=Shapes([(1,), (2, 3)]), output_types=[Type(FLOAT), Type(FLOAT)])
    variable(nodes, "v", (6,), is_resource=False)
    variable(nodes, "h", (7,), is_resource=True)
    nodes.add("read", "ReadVariableOp", "h", dtype=Type(FLOAT))
    for name, tensor in {"a": "c", "b": "it:1", "d": "v", "e": "read"}.items():
        nodes.all_reduce(name, tensor)
    found = {name: gradient.shape for name, gradient in gradients_of(nodes.graph_def).items()}
    assert found == {"a": (1, 2), "b": (2, 3), "d": (6,), "e": (7,)}


def test_the_handle_of_a_variable_is_a_scalar_and_says_nothing_of_its_value():
    nodes = Nodes()
    nodes.add("h", "VarHandleOp", dtype=Type(FLOAT), shape=Shape([-1, 4]), _output_shapes=Shapes([()]))
    nodes.add("read", "ReadVariableOp", "h", dtype=Type(FLOAT), _output_shapes=Shapes([(-1, 4)]))
    assert shape_of(nodes, "read") is None


def test_a_shape_is_known_however_long_the_way_and_whoever_asks_first():
    """The gradient at the far end does not spoil the shape of one in the middle."""
    nodes = Nodes()
    tensor = nodes.placeholder("p", [5])
    for number in range(3000):
        tensor = nodes.identity(f"i{number}", tensor)
        if number in (50, 2999):
            nodes.all_reduce(f"ar_{number}", tensor)
    assert {gradient.shape for gradient in gradients_of(nodes.graph_def).values()} == {(5,)}


def test_sources_that_disagree_are_an_error_that_shows_all():
    nodes = Nodes()
    nodes.placeholder("g", [2, 3])
    nodes.all_reduce("ar", "g", _output_shapes=Shapes([(3, 2)]))
    variable(nodes, "w", (6,), is_resource=False)
    nodes.add("train", "ApplyGradientDescent", "w", "w", "ar")
    with pytest.raises(ReductionError, match="sources of a gradient's shape disagree, node ar") as caught:
        gradients_of(nodes.graph_def)
    for part in ("[3, 2] by _output_shapes of the all-reduce", "[6] by variable w", "[2, 3] by node g"):
        assert part in str(caught.value)


@pytest.mark.parametrize("op", ["Reshape", "Fill", "Conv2DBackpropFilter", "Identity", "AddN", "ReadVariableOp"])
@pytest.mark.parametrize("inputs", [[], ["g"], ["^g"]], ids=["none", "one", "control"])
def test_a_node_with_too_few_inputs_tells_no_shape(op, inputs):
    nodes = Nodes()
    nodes.placeholder("g", [2])
    nodes.add("odd", op, *inputs)
    shape = shape_of(nodes, "odd")
    assert shape == ((2,) if inputs == ["g"] and op in ("Identity", "AddN") else None)


@pytest.mark.parametrize("size", [-1, 2**40])
@pytest.mark.parametrize("as_content", [True, False])
def test_a_constant_that_contradicts_itself_tells_no_shape(size, as_content):
    nodes = Nodes()
    sizes(nodes, [2])
    tensor = nodes.graph_def.node[0].attr["value"].tensor
    tensor.tensor_shape.dim[0].size = size
    if not as_content:
        tensor.tensor_content = b""
        tensor.int_val.append(2)
    nodes.add("g", "Reshape", "sizes", "sizes")
    assert shape_of(nodes, "g") is None


@pytest.mark.parametrize(("values", "expected"), [([3], (3, 3)), ([3, 4], (3, 4)), ([], (0, 0))])
def test_a_constant_written_short(values, expected):
    """Protobuf's way to write a constant leaves out repeats of the last value, and zeros."""
    nodes = Nodes()
    sizes(nodes, [9, 9])
    tensor = nodes.graph_def.node[0].attr["value"].tensor
    tensor.tensor_content = b""
    tensor.int_val.extend(values)
    nodes.add("g", "Reshape", "sizes", "sizes")
    assert shape_of(nodes, "g") == expected


def test_a_training_op_that_leads_to_no_variable_updates_nothing():
    nodes = Nodes()
    nodes.all_reduce("ar", nodes.placeholder("g", [2]))
    nodes.add("train", "ApplyGradientDescent", "^ar")
    nodes.add("nothing", "Identity")
    nodes.add("train_nothing", "ApplyGradientDescent", "nothing", "g", "ar")
    nodes.add("train_a_tensor", "ApplyGradientDescent", "g", "g", "ar")
    nodes.add("too_short", "ApplyGradientDescent", "g", "ar")
    assert gradients_of(nodes.graph_def)["ar"].variable is None


def test_looking_at_a_graph_does_not_change_it():
    """Protobuf adds an entry to a map of messages when it is only read by its key."""
    nodes = Nodes()
    nodes.placeholder("x", [2])
    nodes.add("enter", "Enter", "x")
    nodes.add("handle", "VarHandleOp")
    for name, op in {
        "a": "IteratorGetNext",
        "b": "Const",
        "c": "Placeholder",
        "d": "ReadVariableOp",
        "e": "Fill",
    }.items():
        nodes.add(name, op, *(["handle"] if op == "ReadVariableOp" else ["b"] if op == "Fill" else []))
        nodes.all_reduce(f"ar_{name}", name, fusion=None, fusion_id=None)
    nodes.add("train", "ApplyGradientDescent", "handle", "x", "ar_c")
    before = nodes.graph_def.SerializeToString(deterministic=True)

    assert {gradient.shape for gradient in gradients_of(nodes.graph_def).values()} == {None}
    assert nodes.graph_def.SerializeToString(deterministic=True) == before


# -------------------------------------------------------------------------------------------- the last resort


def test_inference_is_asked_only_for_what_is_unknown():
    graph_def = gradients_graph((2,), (3,))
    nodes = Nodes(graph_def.node)
    for name in ("b1", "b2"):
        nodes.all_reduce(name, nodes.add(f"{name}/g", "SomeOp"))
    asked = []

    def infer(given: GraphDef, gradients: list[GradientId]) -> dict[GradientId, tuple[int, ...] | None]:
        asked.append((given, gradients))
        return {GradientId("", "b1"): (5, 6), GradientId("", "b2"): None}

    item = Find(infer).run(GraphItem(graph_def)).item

    assert asked == [(graph_def, [GradientId("", "b1"), GradientId("", "b2")])]
    assert {g.name: g.shape for g in item.gradients} == {"ar_0": (2,), "ar_1": (3,), "b1": (5, 6), "b2": None}


def test_inference_is_not_asked_where_all_is_known():
    def infer(*_: object) -> dict[GradientId, None]:
        raise AssertionError("asked")

    Find(infer).run(GraphItem(gradients_graph((2,), (3,))))


@pytest.mark.parametrize("dtype", [BOOL, FLOAT, DOUBLE, INT32, INT64, HALF])
def test_numeric_types_are_fine(dtype):
    assert gradients_of(one(dtype=dtype))["ar"].dtype == dtype


def test_a_scalar_that_scales_a_gradient_is_not_the_variables_gradient():
    nodes = Nodes()
    nodes.placeholder("count", ())
    nodes.all_reduce("total", "count")
    nodes.placeholder("gradient", (10, 10))
    nodes.add("scaled", "RealDiv", "gradient", "total", T=Type(FLOAT))
    nodes.add("w", "VarHandleOp", dtype=Type(FLOAT), shape=Shape((10, 10)))
    nodes.placeholder("rate", ())
    nodes.add("update", "ResourceApplyGradientDescent", "w", "rate", "scaled", T=Type(FLOAT))

    (found,) = gradients_of(nodes.graph_def).values()

    assert (found.shape, found.variable) == ((), None)
