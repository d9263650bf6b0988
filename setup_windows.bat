@echo off
rem Creates the Python environment; with --test it also runs the tests. --help lists the flags.
rem This file finds a Python; launchers\environment.py does the rest, shared with setup.sh.
setlocal EnableExtensions DisableDelayedExpansion
cd /d "%~dp0"
if not exist launchers\environment.py (
    echo Cannot run in "%~dp0": the folder launchers is missing here, or a network path has no drive letter. 1>&2
    if "%~1"=="" pause
    exit /b 1
)
set "PYTHONUTF8=1"
set "PIP_DISABLE_PIP_VERSION_CHECK=1"
rem Packages of another Python are no part of the environment.
set "PYTHONHOME="
set "PYTHONPATH="
set "PYTHONSAFEPATH="
set "BASE="
set "TOO_OLD="
set "INCOMPLETE="
set "STUB="

rem Names instead of paths: the console's code page damages a path with an umlaut.
rem Tested versions first: a newer Python may have no PyTorch with Triton on Windows yet.
for %%P in ("py -3.14" "py -3.13" "py -3.12" "py -3.11" "py -3.10" "py -3" "python" "python3") do call :probe %%~P
if defined BASE goto found
set "REMEDY=winget install Python.Python.3.12"
if defined INCOMPLETE (
    echo Set-up stopped: %INCOMPLETE% lacks venv or ensurepip. Install them:  %REMEDY% 1>&2
) else if defined TOO_OLD (
    echo Set-up stopped: %TOO_OLD% is too old or 32-bit. Install Python 3.10 or newer, 64-bit:  %REMEDY% 1>&2
) else if defined STUB (
    echo Set-up stopped: %STUB% only opens the Microsoft Store. Install Python 3.10 or newer:  %REMEDY% 1>&2
) else (
    echo Set-up stopped: no Python found. Install 3.10 or newer:  %REMEDY% 1>&2
)
if "%~1"=="" pause
exit /b 1

:found
%BASE% -X utf8 -m launchers.environment %*
set "CODE=%ERRORLEVEL%"
rem Without arguments it may be a double click, and its window would close at once.
if "%~1"=="" pause
exit /b %CODE%

:probe
rem Stores the first suitable Python in BASE, called by %*, and why another one is not suitable.
if defined BASE exit /b 0
rem The Store's stub only opens the Store and exits with 9009; py is none, but can be in the same folder.
rem The code of a crash is negative: not `if errorlevel 1`.
%* -c "import sys" >nul 2>nul
if not "%ERRORLEVEL%"=="0" (
    where %1 2>nul | findstr /i "WindowsApps" >nul
    if not errorlevel 1 if not "%1"=="py" set "STUB=%1"
    exit /b 0
)
%* -c "import sys; sys.exit(not ((3, 10) <= sys.version_info and 2**32 < sys.maxsize))"
if not "%ERRORLEVEL%"=="0" (
    set "TOO_OLD=%*"
    exit /b 0
)
%* -c "import ensurepip, venv" >nul 2>nul
if not "%ERRORLEVEL%"=="0" (
    set "INCOMPLETE=%*"
    exit /b 0
)
set "BASE=%*"
exit /b 0
