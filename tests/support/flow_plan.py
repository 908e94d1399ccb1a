"""The mesh of the flow tests: two quick pools by language, and a slow model with two slots."""

from drill_mesh import MODEL, MeshPlan, tenant, worker

SLOW = "slow-8b"
"""5 ms a token at two slots: what stands behind two long answers waits as long as a test wants."""
SLOW_SLOTS = 2


def flow_plan(**tenants: object) -> MeshPlan:
    """``tenants`` adds to or replaces the three usual ones."""
    plan = MeshPlan()
    return MeshPlan(
        tenants={
            "acme": tenant("gold"),
            "globex": tenant(),
            "initech": tenant(),
            **tenants,  # pyright: ignore[reportArgumentType] - tables, as the others are
        },
        pools={
            **plan.pools,
            "slow": {"models": [SLOW], "policy": "fcfs", "default": True},
        },
        workers={
            **plan.workers,
            "slow-1": worker("slow", SLOW_SLOTS, models=[SLOW], speed_permille=1000),
        },
        models={
            MODEL: {"output_tokens_default": 16, "output_tokens_max": 4096},
            SLOW: {"output_tokens_default": 16, "output_tokens_max": 4096},
        },
    )
