"""Planning: what fits on which device, and how a trace of requests would fare, before anything is bought or started.

hardware and catalog know devices and models by name; planner turns them into pages and requests by the arithmetic of
pagedkv.budget; traces, steptime and simulate replay requests through the manager and scheduler that serve.
"""
