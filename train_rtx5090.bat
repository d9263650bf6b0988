@echo off
rem Starts a training run; --help lists the choices.
rem This file finds the environment; everything else stands in launchers\training.py, shared with train_rtx5090.sh.
setlocal EnableExtensions DisableDelayedExpansion
cd /d "%~dp0"
if not exist launchers\training.py (
    echo Cannot work in "%~dp0": a network path needs a drive letter, and the folder launchers beside this file. 1>&2
    exit /b 1
)
set "PYTHONUTF8=1"
rem Short, because compiled kernels have long names and Windows stops at 260 characters.
if not defined TORCHINDUCTOR_CACHE_DIR set "TORCHINDUCTOR_CACHE_DIR=%LOCALAPPDATA%\ti"

set "PYTHON=%VAE_PYTHON%"
if defined PYTHON goto start
set "PYTHON=.venv\Scripts\python.exe"
rem The set-up writes the stamp last, so an interrupted one is completed here.
if exist "%PYTHON%" if exist ".venv\.setup-stamp.json" goto start
rem Help is answered by any Python, before gigabytes are downloaded.
if "%~1"=="--help" set "PYTHON=python"
if "%~1"=="--help" goto start
call setup_windows.bat --yes
if errorlevel 1 exit /b %ERRORLEVEL%

:start
"%PYTHON%" -X utf8 -m launchers.training %*
set "CODE=%ERRORLEVEL%"
rem Without arguments it may have been a double click, whose window would close on the last lines.
if "%~1"=="" pause
exit /b %CODE%
