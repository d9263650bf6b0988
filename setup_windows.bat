@echo off
rem Makes the Python environment and, with --test, runs the tests; --help lists the flags.
rem This file finds a Python; everything else stands in launchers\environment.py, shared with setup.sh.
setlocal EnableExtensions DisableDelayedExpansion
cd /d "%~dp0"
if not exist launchers\environment.py (
    echo Cannot work in "%~dp0": a network path needs a drive letter, and the folder launchers beside this file. 1>&2
    exit /b 1
)
set "PYTHONUTF8=1"
set "PIP_DISABLE_PIP_VERSION_CHECK=1"
set "TOO_OLD="
set "INCOMPLETE="
set "STUB="

rem Names, never paths: a path with an umlaut does not survive the console's code page.
for %%P in ("py -3" "python" "python3" "py -3.14" "py -3.13" "py -3.12" "py -3.11" "py -3.10") do (
    call :probe %%~P
    if not errorlevel 1 (
        set "BASE=%%~P"
        goto found
    )
)
set "MEND=winget install Python.Python.3.12"
if defined INCOMPLETE (
    echo Set-up stopped: %INCOMPLETE% lacks venv or ensurepip. What mends it:  %MEND% 1>&2
) else if defined TOO_OLD (
    echo Set-up stopped: %TOO_OLD% is too old or 32-bit; Python 3.10 or newer, 64-bit, is needed:  %MEND% 1>&2
) else if defined STUB (
    echo Set-up stopped: %STUB% only opens the Microsoft Store; Python 3.10 or newer is needed:  %MEND% 1>&2
) else (
    echo Set-up stopped: no Python found; 3.10 or newer is needed:  %MEND% 1>&2
)
if "%~1"=="" pause
exit /b 1

:found
%BASE% -X utf8 -m launchers.environment %*
set "CODE=%ERRORLEVEL%"
rem Without arguments it may have been a double click, whose window would close on the last lines.
if "%~1"=="" pause
exit /b %CODE%

:probe
rem Exit code 0 when the Python that is called by %* will do; otherwise remembers why it will not.
rem The Store's stub exists but runs nothing: it opens the Store and exits with 9009.
%* -c "import sys" >nul 2>nul
if errorlevel 1 (
    where %1 2>nul | findstr /i "WindowsApps" >nul
    if not errorlevel 1 set "STUB=%1"
    exit /b 1
)
%* -c "import sys; sys.exit(not ((3, 10) <= sys.version_info and 2**32 < sys.maxsize))"
if errorlevel 1 (
    set "TOO_OLD=%*"
    exit /b 1
)
%* -c "import ensurepip, venv" >nul 2>nul
if errorlevel 1 (
    set "INCOMPLETE=%*"
    exit /b 1
)
exit /b 0
