"""Rates of GPUs and the errors of predicted times. Written by `benchmarks/plan_rows.py --write`."""

from titanlite.tools.plan.accuracy import Error, Fitted

FITTED: dict[str, Fitted] = {
    "H200": Fitted(
        rates=(0.6, 0.35, 0.55, 1.0),
        rows=21,
        error=Error(median=0.1103, p90=0.1503, rows=10),
        by_kind={
            "data parallel": Error(median=0.1127, p90=0.1643, rows=8),
            "tp or cp": Error(median=0.1037, p90=0.1134, rows=2),
        },
        constant_mfu=0.483,
        constant_error=Error(median=0.1341, p90=0.4285, rows=10),
    ),
    "H100-96GB-500W": Fitted(
        rates=(0.5, 0.35, 0.8, 1.0),
        rows=19,
        error=Error(median=0.0738, p90=0.1779, rows=9),
        by_kind={
            "data parallel": Error(median=0.0204, p90=0.0204, rows=1),
            "tp or cp": Error(median=0.0857, p90=0.1779, rows=7),
            "pp": Error(median=0.0111, p90=0.0111, rows=1),
        },
        constant_mfu=0.334,
        constant_error=Error(median=0.1527, p90=0.318, rows=9),
    ),
    "A100-80GB": Fitted(
        rates=(0.8, 0.5, 0.55, 2.6),
        rows=508,
        error=Error(median=0.0571, p90=0.163, rows=254),
        by_kind={
            "data parallel": Error(median=0.0616, p90=0.1121, rows=50),
            "tp or cp": Error(median=0.0689, p90=0.408, rows=87),
            "pp": Error(median=0.045, p90=0.133, rows=117),
        },
        constant_mfu=0.164,
        constant_error=Error(median=0.5723, p90=2.9983, rows=254),
    ),
    "GB300-NVL72": Fitted(
        rates=(0.8, 0.35, 0.7, 1.0),
        rows=7,
        error=Error(median=0.0803, p90=0.2571, rows=3),
        by_kind={
            "data parallel": Error(median=0.2571, p90=0.2571, rows=1),
            "pp": Error(median=0.0671, p90=0.0803, rows=2),
        },
        constant_mfu=1.082,
        constant_error=Error(median=0.031, p90=0.2427, rows=3),
    ),
    "H100": Fitted(
        rates=(0.65, 0.35, 0.7, 1.0),
        rows=50,
        error=Error(median=0.0396, p90=0.0963, rows=25),
        by_kind={
            "data parallel": Error(median=0.0413, p90=0.0963, rows=20),
            "tp or cp": Error(median=0.0407, p90=0.0407, rows=1),
            "pp": Error(median=0.0316, p90=0.0855, rows=4),
        },
        constant_mfu=0.435,
        constant_error=Error(median=0.124, p90=0.4547, rows=25),
    ),
    "GB200-NVL72": Fitted(
        rates=(0.55, 0.35, 0.7, 1.0),
        rows=8,
        error=Error(median=0.0815, p90=0.1137, rows=4),
        by_kind={
            "data parallel": Error(median=0.1137, p90=0.1137, rows=1),
            "tp or cp": Error(median=0.0813, p90=0.0813, rows=1),
            "pp": Error(median=0.0411, p90=0.0817, rows=2),
        },
        constant_mfu=0.845,
        constant_error=Error(median=0.0847, p90=0.1034, rows=4),
    ),
    "A100-40GB": Fitted(
        rates=(0.8, 0.5, 0.7, 1.0),
        rows=43,
        error=Error(median=0.0247, p90=0.13, rows=21),
        by_kind={"data parallel": Error(median=0.0247, p90=0.13, rows=21)},
        constant_mfu=0.506,
        constant_error=Error(median=0.0689, p90=0.1348, rows=21),
    ),
}
