"""The entry point `python -m moe_rt.planner.score`, under the name that scripts know; the room is moe_rt.plan."""
