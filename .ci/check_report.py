"""Reads pytest's JUnit reports: nothing skipped, and tests ran on asyncio and on trio: `check_report.py FILE...`."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

LOOP = re.compile(r"\[(?:.*-)?(asyncio|trio)(?:\+[^\]-]*)?(?:-.*)?\]$")


def main(*reports: str) -> int:
    missing = [report for report in reports if not Path(report).exists()]
    if missing or not reports:
        print(f"expected the reports of pytest, got none at {missing or 'all'}")
        return 1
    ran: Counter[str] = Counter()
    faults: list[str] = []
    for case in (case for report in reports for case in ET.parse(report).iter("testcase")):
        name = f"{case.get('classname')}::{case.get('name')}"
        skipped = case.find("skipped")
        # An expected failure is reported as a skip of its own type; it did run.
        if skipped is not None and skipped.get("type") != "pytest.xfail":
            faults.append(f"skipped: {name}: {skipped.get('message')}")
            continue
        loop = LOOP.search(case.get("name") or "")
        ran[loop.group(1) if loop else "no event loop of the fixture's"] += 1
    faults.extend(f"no test ran on {loop}" for loop in ("asyncio", "trio") if not ran[loop])
    print(f"{ran.total()} tests ran: " + ", ".join(f"{count} on {loop}" for loop, count in sorted(ran.items())))
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
