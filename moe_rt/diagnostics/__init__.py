"""Reports on which ranks wait for which, made from inside or another process, while ranks run, hang or are dead."""

from moe_rt.diagnostics.attach import attach
from moe_rt.diagnostics.report import OpRecord, RankReport, Report

__all__ = ["OpRecord", "RankReport", "Report", "attach"]
