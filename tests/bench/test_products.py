from __future__ import annotations

import torch

from covpool.bench.products import recorded_products


def test_every_kind_of_product_is_recorded_with_its_factors() -> None:
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    total = torch.zeros(2, 3, 5)

    def run() -> None:
        torch.bmm(a, b)
        torch.bmm(a, b, out=total)
        torch.baddbmm(total, a, b)
        total.baddbmm_(a, b)
        a @ b
        a[0] @ b[0]

    products = recorded_products(run)
    assert len(products) == 6
    assert [product.left.shape for product in products] == [(2, 3, 4)] * 5 + [(3, 4)]
    assert products[0].multiplications == 2 * 3 * 4 * 5


def test_products_of_the_gradient_are_recorded() -> None:
    a = torch.randn(2, 3, 3, requires_grad=True)
    assert len(recorded_products(lambda: torch.bmm(a, a).sum().backward())) == 3


def test_a_transposed_factor_is_the_same_memory_with_other_strides() -> None:
    a = torch.randn(2, 3, 4)
    (product,) = recorded_products(lambda: torch.bmm(a, a.mT))
    assert product.left.memory == product.right.memory
    assert product.left.stride == (12, 4, 1)
    assert product.right.stride == (12, 1, 4)


def test_values_written_over_others_lie_in_the_same_place() -> None:
    a = torch.randn(2, 3, 3)

    def run() -> None:
        torch.bmm(a, a)
        a.mul_(2)
        torch.bmm(a, a)

    before, after = recorded_products(run)
    assert before.left.memory == after.left.memory


def test_memory_freed_and_used_again_is_another_factor() -> None:
    def run() -> None:
        for _ in range(3):
            fresh = torch.randn(2, 64, 64)
            torch.bmm(fresh, fresh)

    assert len({product.left.memory for product in recorded_products(run)}) == 3
