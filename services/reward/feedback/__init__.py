"""A component that a person or a product supplies minutes after the rollout.

    scored but for it ─▶ parked (sao.streams.room) ─┬─ answered: joined, reward under the preference current now ─▶ SCORED
                                                     └─ deadline, or too many: a dead letter, or scored without it

`desk` does it, `routes` is POST and GET /v1/feedback, `asking` says which trajectories are asked for.
`leftovers` is for a run whose file asks no more.
"""  # noqa: E501
