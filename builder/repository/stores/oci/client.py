"""Requests to the API of an OCI registry: authentication, attempts, errors (distribution-spec 1.1)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping
from typing import IO
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter

from builder.common.addresses import is_loopback
from builder.common.errors import RepositoryError, first_line
from builder.common.registry_address import Address
from builder.repository.stores.oci.credentials import Credentials, config_file, credentials_of
from builder.repository.stores.store import ATTEMPTS, PAUSE_S

TIMEOUT_S = (10, 120)  # to connect, between two packets of an answer
CONNECTIONS = 8
BUSY = 429
PARAMETER = re.compile(r'(\w+)="([^"]*)"')  # of a WWW-Authenticate header
CLIENT_ID = "build-repo"


class RegistryDownError(RepositoryError):
    """A registry that could not be reached, or failed at each attempt."""


Body = Callable[[], bytes | IO[bytes]]  # opens what a request sends, once an attempt


class RegistryClient:
    """Client of one repository of a registry. Threads may share it."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._base = f"{address.endpoint}/v2/{address.repository}/"
        self._authorization: str | None = None
        self._session = requests.Session()
        self._session.auth = lambda request: request  # a ~/.netrc would replace the header of a token
        self._session.headers["Accept-Encoding"] = "identity"
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_maxsize=CONNECTIONS))

    def send(
        self,
        method: str,
        path: str,
        expected: Collection[int],
        *,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        stream: bool = False,
        attempts: int = ATTEMPTS,
    ) -> requests.Response:
        """Send a request for a path of the repository, or for an address that the registry answered.

        It is repeated if the connection breaks, and if the registry is busy or fails. Raises RepositoryError unless
        the status of its answer is `expected`.
        """
        url = self.absolute(path)
        problem = ""
        for attempt in range(attempts):
            if attempt:
                time.sleep(PAUSE_S * 2 ** (attempt - 1))
            try:
                answer = self._authorised(method, url, headers or {}, body, stream)
            except requests.RequestException as error:
                problem = f"could not be reached: {_connection_problem(error)}"
                continue
            if answer.status_code in expected:
                return answer
            problem = f"answered {_reason(answer)} to {method} {urlsplit(url).path}"
            answer.close()
            if answer.status_code in (401, 403):
                raise RepositoryError(f"{self.address.url}: the registry {problem}; {self._login_advice()}")
            if answer.status_code != BUSY and answer.status_code < 500:
                raise RepositoryError(f"{self.address.url}: the registry {problem}")
        raise RegistryDownError(f"{self.address.url}: the registry {problem}")

    def absolute(self, path: str) -> str:
        """Return the address of a path of the repository, or of a location on the registry."""
        if re.match(r"https?://", path):
            return path
        return self.address.endpoint + path if path.startswith("/") else self._base + path

    def _authorised(
        self, method: str, url: str, headers: Mapping[str, str], body: Body | None, stream: bool
    ) -> requests.Response:
        """Send a request; if the registry asks for credentials, once more with them."""
        answer = self._once(method, url, headers, body, stream, self._authorization)
        challenge = answer.headers.get("WWW-Authenticate")
        if answer.status_code != 401 or challenge is None or not self._is_own(url):
            return answer
        answer.close()
        authorization = self._authorization = self._answer_to(challenge)  # another thread may replace it
        return self._once(method, url, headers, body, stream, authorization)

    def _once(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Body | None,
        stream: bool,
        authorization: str | None,
    ) -> requests.Response:
        own = {"Authorization": authorization} if authorization and self._is_own(url) else {}
        content = None if body is None else body()
        try:
            return self._session.request(
                method, url, headers={**headers, **own}, data=content, stream=stream, timeout=TIMEOUT_S
            )
        finally:
            if content is not None and not isinstance(content, bytes):
                content.close()

    def _is_own(self, url: str) -> bool:
        """Return True if an address is the registry's, not of a storage that it sends to: that gets no credentials."""
        return url.startswith(f"{self.address.endpoint}/")

    def _answer_to(self, challenge: str) -> str | None:
        """Return the Authorization header that a registry asks for; None if there are no credentials for it."""
        credentials = credentials_of(self.address.registry)
        kind, _, rest = challenge.partition(" ")
        if kind.lower() == "basic":
            return None if credentials is None else credentials.basic()
        parameters = dict(PARAMETER.findall(rest))
        realm = urlsplit(parameters.get("realm", ""))
        if kind.lower() != "bearer" or not realm.hostname:
            raise RepositoryError(f"{self.address.url}: the registry asks for {kind!r} authentication, expected Bearer")
        if realm.scheme != "https" and not (self.address.is_plain_http or is_loopback(realm.hostname)):
            raise RepositoryError(
                f"{self.address.url}: the registry wants credentials at {realm.geturl()}, which is not encrypted"
            )
        return f"Bearer {self._token(realm.geturl(), parameters, credentials)}"

    def _token(self, realm: str, parameters: Mapping[str, str], credentials: Credentials | None) -> str:
        """Return the token that a registry's authorization service gives for a scope. Raises RepositoryError."""
        asked = {name: parameters[name] for name in ("service", "scope") if name in parameters}
        if credentials is not None and not credentials.username:
            grant = {"grant_type": "refresh_token", "client_id": CLIENT_ID, "refresh_token": credentials.secret}
            content = {**asked, **grant}  # another host that it redirects to would get the token
            answer = self._session.post(realm, data=content, timeout=TIMEOUT_S, allow_redirects=False)
        else:
            headers = {} if credentials is None else {"Authorization": credentials.basic()}
            answer = self._session.get(realm, params=asked, headers=headers, timeout=TIMEOUT_S)
        if answer.status_code in (401, 403):
            raise RepositoryError(f"{self.address.url}: {realm} answered {_reason(answer)}; {self._login_advice()}")
        try:
            answer.raise_for_status()
            document = answer.json()
            return str(document.get("token") or document["access_token"])
        except (requests.HTTPError, AttributeError, KeyError, ValueError) as error:
            raise RepositoryError(f"{self.address.url}: {realm} gave no token ({first_line(error)})") from error

    def _login_advice(self) -> str:
        return (
            f"its credentials are looked for in {config_file()}, as docker login {self.address.registry} writes them, "
            "and must allow this"
        )


def _connection_problem(error: requests.RequestException) -> str:
    """Return the innermost reason of a failed connection."""
    reason: BaseException = error
    while reason.__cause__ is not None or reason.__context__ is not None:
        reason = reason.__cause__ or reason.__context__ or reason
    return first_line(reason)[:300]


def _reason(answer: requests.Response) -> str:
    """Return the status of an answer, and the registry's message if it has one."""
    try:
        first = answer.json()["errors"][0]
        return f"{answer.status_code} ({first['code']}: {str(first.get('message'))[:200]})"
    except (requests.RequestException, AttributeError, KeyError, IndexError, TypeError, ValueError):
        return str(answer.status_code)
