"""Reports on which ranks wait for which, also from another process, and digests that show where two runs part."""

from moe_rt.diagnostics.attach import attach
from moe_rt.diagnostics.digests import Digest, digest
from moe_rt.diagnostics.report import OpRecord, RankReport, Report

__all__ = ["Digest", "OpRecord", "RankReport", "Report", "attach", "digest"]
