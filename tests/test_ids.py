"""Ids: new ones are ULIDs, and every one matches the pattern."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ulid import ULID

from dreamlake.lakeshore.errors import WireError
from dreamlake.lakeshore.ids import check_id, new_id


def test_a_new_id_is_a_ulid_of_now() -> None:
    before = time.time()
    made = [new_id() for _ in range(1000)]
    after = time.time()
    assert len(set(made)) == 1000
    assert all(len(id) == 26 and check_id(id) == id for id in made)
    assert all(before - 0.001 <= ULID.from_str(id).timestamp <= after + 0.001 for id in made)


FORK = """
import os, sys
from dreamlake.lakeshore.ids import new_id
new_id()
child = os.fork()
sys.stdout.write(new_id() + " ")
sys.stdout.flush()
if child:
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_makes_other_ids() -> None:
    out = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True, timeout=60).stdout
    one, other = out.split()
    assert one[10:] != other[10:]


@pytest.mark.parametrize("id", ["a", "A-b_9", "x" * 64])
def test_an_id_of_the_pattern_passes(id: str) -> None:
    assert check_id(id) == id


@pytest.mark.parametrize(
    ("id", "shown"),
    [("", "''"), ("a/b", "'a/b'"), ("..", "'..'"), ("a\n", "'a\\n'"), ("é", "'é'"), ("x" * 65, "'xxx"), (7, "a int")],
)
def test_any_other_id_is_an_error(id: object, shown: str) -> None:
    with pytest.raises(WireError) as caught:
        check_id(id)
    assert f"expected an invocation id of 1 to 64 letters, digits, '_' or '-', got {shown}" in str(caught.value)


@given(st.text(max_size=70))
def test_every_id_that_passes_is_a_plain_file_name(id: str) -> None:
    try:
        assert os.path.basename(check_id(id)) == id.strip(". \n") != ""
    except WireError:
        pass
