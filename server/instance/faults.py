"""What vLLM fails over before the engine has answered is the request's fault: it gets a typed 400, and no 500.

vLLM's schemas admit values that its code then cannot take, such as a text where the code asks for a key. A 500 tells
the client to try again, and the gateway to leave the instance out.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from .provenance import cannot_take, current_trace

log = logging.getLogger("hotswap.instance")
KINDS = (AttributeError, LookupError, ArithmeticError, RecursionError)  # vLLM does so itself for others


def answer_faults(app: FastAPI) -> None:
    """Register the handlers beside vLLM's own."""
    whole: Any = app.exception_handlers
    app.add_exception_handler(AnyHTTPException, whole[HTTPException])  # FastAPI raises it for a body it cannot parse
    vllm_s = whole[Exception]

    async def refuse(request: Request, error: Exception) -> Any:
        trace = current_trace.get()
        if trace is None or trace.begun:
            return await vllm_s(request, error)
        log.warning("vLLM cannot take a request", exc_info=error)
        told = {"message": cannot_take(error), "type": "BadRequestError", "param": None, "code": 400}
        return JSONResponse({"error": told}, status_code=400)

    for kind in KINDS:
        app.add_exception_handler(kind, refuse)
    if app.middleware_stack is not None:  # vLLM has had it built, with a copy of the handlers of before
        app.middleware_stack = app.build_middleware_stack()
