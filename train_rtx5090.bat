@echo off
rem Starts a training run; --help lists the arguments.
rem This file finds the environment; launchers\training.py does the rest, shared with train_rtx5090.sh.
setlocal EnableExtensions DisableDelayedExpansion
cd /d "%~dp0"
if not exist launchers\training.py (
    echo Cannot run in "%~dp0": the folder launchers is missing here, or a network path has no drive letter. 1>&2
    if "%~1"=="" pause
    exit /b 1
)
set "PYTHONUTF8=1"
rem It would hide the folder launchers.
set "PYTHONSAFEPATH="
rem A short path, because compiled kernels have long names and Windows limits paths to 260 characters.
if not defined TORCHINDUCTOR_CACHE_DIR set "TORCHINDUCTOR_CACHE_DIR=%LOCALAPPDATA%\ti"

set "PYTHON=%VAE_PYTHON%"
if defined PYTHON goto start
set "PYTHON=.venv\Scripts\python.exe"
rem Of another Python.
set "PYTHONHOME="
set "PYTHONPATH="
rem The set-up writes the stamp last. Without it, the set-up was interrupted and runs again.
if exist "%PYTHON%" if exist ".venv\.setup-stamp.json" goto start
rem --help works with any Python, before gigabytes are downloaded.
set "HELP="
if "%~1"=="--help" set "HELP=1"
if "%~1"=="-h" set "HELP=1"
if defined HELP set "PYTHON=python"
if defined HELP py -3 -c "" >nul 2>nul && set "PYTHON=py"
if defined HELP goto start
call .\setup_windows.bat --yes
rem Not `if errorlevel 1`: the exit code after Ctrl-C or a crash is negative.
if not "%ERRORLEVEL%"=="0" goto stop

:start
"%PYTHON%" -X utf8 -m launchers.training %*
:stop
set "CODE=%ERRORLEVEL%"
rem Without arguments it may be a double click, and its window would close at once.
if "%~1"=="" pause
exit /b %CODE%
