"""``python -m compaction_proxy``."""

from compaction_proxy.cli import main

main()
