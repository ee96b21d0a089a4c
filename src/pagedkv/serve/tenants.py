"""Tenants: who they are by their API key, where they share, and how many pages they are sure of and may have.

A tenant's requests share pages with nobody else's. The engine keeps the limits (see cache/tenants.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pagedkv.config_sources import read_file
from pagedkv.errors import ConfigError, InvalidRequestError
from pagedkv.serve.messages import Limit, Namespace


class Tenant(BaseModel):
    """A caller of its own.

    Attributes:
        name: what operators call it.
        api_key: how it is known; never shown.
        floor: pages that it is sure of.
        ceiling: pages that its requests may use at most; None for no limit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    api_key: str = Field(repr=False, min_length=1)
    floor: int = Field(default=0, ge=0)
    ceiling: int | None = Field(default=None, ge=1)

    @property
    def limit(self) -> Limit | None:
        """What the engine must know; None if there is nothing to keep."""
        if not self.floor and self.ceiling is None:
            return None
        return Limit((self.name, None), self.floor, self.ceiling)

    def namespace(self, salt: str | None) -> Namespace:
        """Where a request with this cache_salt shares.

        Raises:
            InvalidRequestError: the tenant has limits, which hold for one namespace, not for many.
        """
        if salt is not None and self.limit is not None:
            raise InvalidRequestError("cache_salt is not served to a tenant with a floor or a ceiling of pages")
        return self.name, salt


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: one of the tenants, or somebody without a name."""

    tenant: Tenant | None = None

    def namespace(self, salt: str | None) -> Namespace:
        """Where a request with this cache_salt shares."""
        return salt if self.tenant is None else self.tenant.namespace(salt)


def read_tenants(path: Path) -> list[Tenant]:
    """Tenants of a YAML file: name -> {api_key, floor, ceiling}.

    Raises:
        ConfigError: the file cannot be read, or says what cannot be; with the file's line, and without its keys.
    """
    fields: dict[str, dict[str, object]] = {}
    places: dict[str, str] = {}
    for key, (value, place) in read_file(path, None).items():
        name, _, option = key.rpartition(".")
        fields.setdefault(name, {})[option] = value
        places[key] = place
    return [_tenant(path, name, found, places) for name, found in fields.items()]


def _tenant(path: Path, name: str, found: dict[str, object], places: dict[str, str]) -> Tenant:
    try:
        return Tenant(name=name, **found)  # type: ignore[arg-type]
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        option = str(fault["loc"][0])
        place = places.get(f"{name}.{option}", str(path))
        raise ConfigError(f"{place}: {name}.{option}: {fault['msg']}") from None
