"""The salt of a tenant's prefixes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.tenants.tenant import DEFAULT_TENANT, MAX_CACHE_SALT_BYTES, Tenant, salt_of

NAMES = st.text(max_size=8)
SALTS = st.binary(max_size=8)


@given(NAMES, SALTS, NAMES, SALTS)
def test_no_two_tenants_share_a_salt(name: str, salt: bytes, other_name: str, other_salt: bytes) -> None:
    ours, theirs = salt_of(Tenant(name), salt), salt_of(Tenant(other_name), other_salt)
    assert (ours == theirs) == ((name, salt) == (other_name, other_salt))
    assert (len(ours) <= MAX_CACHE_SALT_BYTES) == (name == DEFAULT_TENANT.name)


def test_the_default_tenant_has_the_clients_salt_alone() -> None:
    assert salt_of(DEFAULT_TENANT, b"") == b""
    assert salt_of(DEFAULT_TENANT, b"salt") == b"salt"
