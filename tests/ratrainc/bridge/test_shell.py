"""Shell scripts are followed as bash runs them: the same words reach a program, or what is not known is said to be so."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.bridge.shell.arithmetic import ArithmeticError_, evaluate
from ratrain.ratrainc.bridge.shell.following import follow

HAS_BASH = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
PIECES = (
    r"""
x|a#b|-k|/p|.c|1|$N|"$N"|${N}|'$N'|"${N:-x y}"|${N:-u}|${U:-d e}|"${U:-d e}"|${N:+z}|${N%x*}|${N##*x}|${#N}|${N/x/q}
$((3*I+4))|$(( $I / 2 ))|${L[@]}|"${L[@]}"|"${L[*]}"|${L[1]}|${#L[@]}|\$A|'a  b'|"\$A \\ \"q\""|_$A|$A-$B|$A/$B.c|${A}_${B}
--f=$B|,|:|$(echo $A)|x`echo k`|"$(echo "$A" m)"|$(dirname /a/b/c)|$'t\tq'|%|+|@|${A^^}|${M[k]}|${A:1:2}|${L[@]:1}|${!P}|""|''|[z]|!|\ |]
""".replace("\n", "|")
    .strip("|")
    .split("|")
)
STATEMENTS = """\
N=W
N+=W
N+=" $I"
L+=(W W)
export N=W
N=W Q=W
N=W Q=W # a;b
if [ "$N" = x ]; then N=t; else N+=e; fi
[[ $N == x* ]] && N=m
for i in W k; do N+=$i; done
case $N in x*) N=c;; *) N=d;; esac
f() { local A=9; N="$1-$A$#"; }; f W z
(( I > 10 )) && I=$((I-3))
while (( I > 5 )); do I=$((I-2)); N+=w; done
unset N; N=${N:-un}
cat > /dev/null <<END~--lr $A { ( '~END
read -r N Q <<< "p q r"
IFS=, read -ra L <<< "p,q q,r"
eval "N=\\$I"
N=$(echo W)
set -- W w; N=$1
I=$(( I % 7 == 0 ? 3 : I << 1 ))
N=`expr $I + 2`
N=`echo k` Q=`echo "a b"`
if (( I < 10 )) || [ -z "$N" ]; then N=o; elif [[ -n $A && $I -gt 3 ]]; then N=l; fi
for ((j=0;j<3;j++)); do N+=$j; done
g() { echo "$A $1"; }; N=$(g k)
""".splitlines()
STARTS = [
    "torchrun p.py W W",
    "CMD='torchrun p.py x $A'~eval $CMD",
    'CMD="torchrun p.py $A ${L[*]} $B"~$CMD',
    'export I; bash -c "torchrun p.py $I \\$I x"',
    'set -- $A; run() { torchrun p.py "$@"; }; run W "$@"',
]


def script(draw: random.Random) -> str:
    """A script that starts a program, of assignments, conditions and loops before."""

    def filled(text: str) -> str:
        words = text.split("W")
        text = words[0]
        for rest in words[1:]:
            text += "".join(draw.choice(PIECES) for _ in range(draw.choice([1, 1, 1, 2, 3]))) + rest
        name = draw.choice("ABC")
        heads = text.split("N")
        return "".join(
            part + (name if n + 1 < len(heads) and not heads[n + 1].startswith("D") else "N" * (n + 1 < len(heads)))
            for n, part in enumerate(heads)
        ).replace("~", "\n")

    def value() -> str:
        return draw.choice(['""', "x", "'a x b'", '"p  q"', "xyx", '"--lr 3"', "1"])

    items = " ".join(draw.choice(["x", "--o 1", "$A", "#n\n", '"y z"', "'w'"]) for _ in range(draw.randint(0, 3)))
    head = [f"A={value()}", f"B={value()} C={value()}", f"I={draw.randint(1, 30)}", f"L=({items})"]
    head += ["declare -A M=([k]=v [j]='w z')", "P=A"]
    steps = [filled(draw.choice(STATEMENTS)) for _ in range(draw.randint(0, 4))]
    return "\n".join([*head, *steps, filled(draw.choice(STARTS))])


def of_bash(text: str, folder: Path) -> list[list[str]]:
    """The words that bash starts programs with."""
    before = 'torchrun() { printf "%s\\0" "$@" >&3; printf "\\1" >&3; }\nexport -f torchrun\nset -f\n'
    command = ["bash", "-c", f"exec 3>&1 >/dev/null 2>&1\n{before}{text}\n"]
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, timeout=20, cwd=folder, env=environment, check=False)
    return [each.split("\0")[:-1] for each in done.stdout.decode().split("\1")[:-1]]


def words_of(text: str) -> list[list[str]] | None:
    """The words that this reads; None where some are not known, or a condition hangs on what is not."""
    followed = follow("x", text, {})
    launches = followed.launches
    if len(followed.states) > 1 or any(word.unknown is not None for launch in launches for word in launch.words):
        return None
    return [[word.shown for word in launch.words][1:] for launch in launches]


@HAS_BASH
@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 40))
def test_the_words_that_reach_a_program_are_those_of_bash(seed: int) -> None:
    text = script(random.Random(seed))
    if subprocess.run(["bash", "-n", "-c", text], capture_output=True, check=False).returncode == 0:
        assert words_of(text) in (None, of_bash(text, Path(__file__).parent)), text


def test_most_of_these_scripts_are_known_to_the_last_word() -> None:
    assert sum(words_of(script(random.Random(seed))) is not None for seed in range(60)) > 50


SIGNS = ["+", "-", "*", "/", "%", "<<", ">>", "&", "|", "^", "&&", "||", "<", "<=", "==", "!=", ">"]
SUMS = st.recursive(
    st.integers(0, 99).map(str) | st.sampled_from(["a", "b"]),
    lambda inner: (
        st.builds("({} {} {})".format, inner, st.sampled_from(SIGNS), inner)
        | st.builds("{} {} {}".format, inner, st.sampled_from(SIGNS), inner)
        | st.builds("({} ? {} : {})".format, inner, inner, inner)
        | st.builds("{} {}".format, st.sampled_from("-!~"), inner)
    ),
    max_leaves=8,
)


@HAS_BASH
@settings(max_examples=120, deadline=None)
@given(SUMS)
def test_sums_are_those_of_bash(text: str) -> None:
    shell = f"a=7; b=-3; echo $(({text}))"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    try:
        value = evaluate(text, {"a": 7, "b": -3}.__getitem__, lambda _name, _value: None)
    except ArithmeticError_:
        return  # bash wraps at 64 bits, and shifts by anything: so large a number is no size
    assert done.stdout.strip() == str(value), text


ODD = [
    "if",
    "then",
    "else",
    "fi",
    "for",
    "do",
    "done",
    "$(",
    "${",
    "}}",
    "))",
    "((",
    "[[",
    "]]",
    "'",
    '"',
    "`",
    "\\",
    ";",
    "&",
    "|",
    "<<",
    "EOF",
    "A=",
    "--",
    "$A",
    "case",
    "esac",
    "in",
    "{",
    "}",
    "(",
    ")",
    "x",
    ".py",
]


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=80) | st.lists(st.sampled_from([*ODD, "\n", "torchrun"]), max_size=14).map(" ".join))
def test_any_text_is_followed_or_refused(text: str) -> None:
    codes = {"RT063"}
    try:
        follow("x", text, {})
    except DiagnosticError as error:
        codes = {each.code for each in error.diagnostics}
    assert codes <= {"RT063", "RT064"}


@pytest.mark.parametrize(
    "text",
    [
        "f() { f; }; f",
        "A=x; while true; do A=$A$A; done",
        "for ((;;)); do B=$B.; done",
        'a() { eval "a"; }; a',
        "(" * 4000 + ")" * 4000,
        "".join(f"if [ $X{n} = 1 ]; then A+=x{n}; fi\n" for n in range(40)),
    ],
)
def test_scripts_that_go_on_for_ever_are_refused(text: str) -> None:
    with pytest.raises(DiagnosticError):
        follow("x", text, {})


def test_places_are_those_of_the_characters() -> None:
    text = 'É="ü"\nSIZE="--num-layers 12\n--seed 5"\nALL=(\n $SIZE # c\n)\nbash -c "torchrun p.py ${ALL[*]}"\n'
    (launch,) = follow("x", text, {}).launches
    for word in launch.words:
        place = word.place().location
        assert place is not None
        assert text.split("\n")[place.line - 1][(place.column or 1) - 1 :].startswith(word.shown)
